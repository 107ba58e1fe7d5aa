"""NVLink's byte counters of each GPU, by NVML's field values (all links of a GPU together).

A field costs NVML tens of microseconds, so the sum over links is asked, not each link. Where there
is no NVML, no NVLink or no such counter there are no ports, and that is no error.
"""

from __future__ import annotations

from typing import Any

_ALL_LINKS = 0xFFFFFFFF
_SENT, _RECEIVED, _SPEED = 138, 139, 99  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX, SPEED_COMMON
_MOST_LINKS = 18
_KIB = 1024


class NvlinkPort:
    """All links of one GPU. `speed_bytes_per_s` is of one direction."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self.name = nvml, f"nvlink{index}"
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.speed_bytes_per_s = self._speed()
        self.bytes_moved()

    def bytes_moved(self) -> tuple[int, int]:
        fields = [(_SENT, _ALL_LINKS), (_RECEIVED, _ALL_LINKS)]
        sent, received = self._nvml.nvmlDeviceGetFieldValues(self._handle, fields)
        for value in (sent, received):
            if value.nvmlReturn:
                raise OSError(f"{self.name}: NVML gives no counter ({value.nvmlReturn})")
        return sent.value.ullVal * _KIB, received.value.ullVal * _KIB

    def marks(self) -> int | None:
        return None

    def close(self) -> None:
        pass

    def _speed(self) -> float | None:
        (value,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [_SPEED])
        active = sum(self._is_active(link) for link in range(_MOST_LINKS))
        return None if value.nvmlReturn or not active else value.value.uiVal * 1e6 * active

    def _is_active(self, link: int) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetNvLinkState(self._handle, link))
        except self._nvml.NVMLError:
            return False


def nvlink_ports(nvml: Any = None) -> list[NvlinkPort]:
    """nvml: pynvml, or something with its functions; None: pynvml, where it is installed."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return []
        nvml = pynvml
    try:
        nvml.nvmlInit()
        return [NvlinkPort(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except (nvml.NVMLError, OSError):
        return []
