"""Asks NVML, in a process that may be killed: a sick driver blocks these calls for ever.

    python -m megascale.cluster.agent.device_child [FILE]

Each line on standard input is answered with one line of JSON: `{"devices": [...]}`, or `{"missing":
reason}` where there is no NVML; at the end of the input it ends. A fact that a device does not give
is absent. FILE stands in for NVML (`FakeNvml`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TEMPERATURE_GPU, CLOCK_SM, UNCORRECTED, VOLATILE = 0, 1, 1, 0
XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError
MOST_EVENTS = 64  # a read
THROTTLE = {
    0x02: "application_clocks",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}


class Nvml:
    """The devices of one NVML (`pynvml`, or something with the same functions)."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self._events = nvml.nvmlEventSetCreate()
        for handle in self._handles:
            self._try(partial(nvml.nvmlDeviceRegisterEvents, handle, XID_EVENT, self._events))

    def read(self) -> list[dict[str, Any]]:
        """Facts of each device; `xid`: since the last call."""
        xids = self._xids()
        return [self._device(index, xids.get(index, [])) for index in range(len(self._handles))]

    def _device(self, index: int, xids: list[int]) -> dict[str, Any]:
        nvml, handle = self._nvml, self._handles[index]
        asked: dict[str, Callable[[], Any]] = {
            "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
            "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, CLOCK_SM),
            "throttle": lambda: _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, UNCORRECTED, VOLATILE
            ),
            "memory_used_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        }
        facts = {key: self._try(ask) for key, ask in asked.items()}
        known = {key: value for key, value in facts.items() if value is not None}
        return {"index": index, "xid": xids, **known}

    def _xids(self) -> dict[int, list[int]]:
        nvml, found = self._nvml, dict[int, list[int]]()
        for _ in range(MOST_EVENTS):
            event = self._try(lambda: nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                break
            index = self._try(partial(nvml.nvmlDeviceGetIndex, event.device))
            if index is not None and event.eventType == XID_EVENT:
                found.setdefault(index, []).append(int(event.eventData))
        return found

    def _try(self, ask: Callable[[], Any]) -> Any:
        """None for what the device or this driver does not give."""
        try:
            return ask()
        except (self._nvml.NVMLError, AttributeError):
            return None


class FakeNvml:
    """NVML's functions over a JSON file, read at each call.

    devices  a list of the facts that `Nvml.read` gives, `throttle` as NVML's bits
    xids     [index, number] pairs; each is an event once
    hang     names of functions that do not return
    """

    class NVMLError(Exception):
        """What is not supported, or not there."""

    def __init__(self, file: Path) -> None:
        self._file, self._events_told = file, 0

    def _read(self, function: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._file.read_text())
        while function in content.get("hang", ()):
            time.sleep(3600)
        return content

    def _fact(self, function: str, index: int, key: str) -> Any:
        facts = self._read(function)["devices"][index]
        if key not in facts:
            raise self.NVMLError(f"{key} is not supported")
        return facts[key]

    def nvmlInit(self) -> None:
        self._read("nvmlInit")

    def nvmlDeviceGetCount(self) -> int:
        return len(self._read("nvmlDeviceGetCount")["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return self._fact("nvmlDeviceGetName", handle, "name")

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        return self._fact("nvmlDeviceGetUUID", handle, "uuid")

    def nvmlDeviceGetTemperature(self, handle: int, _sensor: int) -> Any:
        return self._fact("nvmlDeviceGetTemperature", handle, "temperature_c")

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        return 1000 * self._fact("nvmlDeviceGetPowerUsage", handle, "power_w")

    def nvmlDeviceGetClockInfo(self, handle: int, _clock: int) -> Any:
        return self._fact("nvmlDeviceGetClockInfo", handle, "sm_clock_mhz")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> Any:
        return self._fact("nvmlDeviceGetCurrentClocksThrottleReasons", handle, "throttle")

    def nvmlDeviceGetTotalEccErrors(self, handle: int, _kind: int, _counter: int) -> Any:
        return self._fact("nvmlDeviceGetTotalEccErrors", handle, "ecc_uncorrected")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        used = self._fact("nvmlDeviceGetMemoryInfo", handle, "memory_used_bytes")
        return SimpleNamespace(used=used)

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, _handle: int, _types: int, _events: object) -> None:
        self._read("nvmlDeviceRegisterEvents")

    def nvmlEventSetWait_v2(self, _events: object, _timeout_ms: int) -> Any:
        xids = self._read("nvmlEventSetWait_v2").get("xids", [])
        if self._events_told >= len(xids):
            raise self.NVMLError("timeout")
        index, number = xids[self._events_told]
        self._events_told += 1
        return SimpleNamespace(device=index, eventType=XID_EVENT, eventData=number)


def _reasons(bits: int) -> list[str]:
    return [name for bit, name in THROTTLE.items() if bits & bit]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _open(fake: str | None) -> Nvml | str:
    """NVML, or why there is none."""
    if fake is not None:
        return Nvml(FakeNvml(Path(fake)))
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed: pip install 'megascale[cluster]'"
    try:
        return Nvml(pynvml)
    except pynvml.NVMLError as error:
        return f"NVML does not start ({error})"


def main(arguments: list[str]) -> None:
    nvml: Nvml | str | None = None
    for _ in sys.stdin:
        nvml = nvml or _open(arguments[0] if arguments else None)
        answer = {"missing": nvml} if isinstance(nvml, str) else {"devices": nvml.read()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
