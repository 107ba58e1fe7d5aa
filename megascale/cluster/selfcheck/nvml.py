"""What NVML says of each GPU. Runs in the probe's process: a sick driver blocks these calls.

Facts that a device or a virtual machine does not give are absent.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Bits of the throttle reasons that speak of hardware in trouble, not of a power budget at work.
THROTTLE = {0x08: "hw_slowdown", 0x40: "hw_thermal", 0x80: "hw_power_brake", 0x20: "sw_thermal"}
UNCORRECTED, VOLATILE = 1, 0
TEMPERATURE_GPU, THRESHOLD_SLOWDOWN = 0, 1


def read_gpus(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """device_files: of the kernel's driver; devices: facts by index; missing: why there are none.

    arguments  root: "/" but in tests
    """
    files = sorted(Path(arguments.get("root", "/"), "dev").glob("nvidia[0-9]*"))
    found: dict[str, Any] = {"device_files": len(files), "devices": []}
    if importlib.util.find_spec("pynvml") is None:
        return {
            **found,
            "missing": "nvidia-ml-py is not installed: pip install 'megascale[cluster]'",
        }
    import pynvml

    return {**found, **read_nvml(pynvml, tell)}


def read_nvml(nvml: Any, tell: Callable[[str], None]) -> dict[str, Any]:
    """The same of an NVML (`pynvml`, or something with the same functions): driver, devices."""
    tell("NVML's start")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"missing": f"NVML does not start ({error})"}
    devices = []
    for index in range(nvml.nvmlDeviceGetCount()):
        tell(f"GPU {index}")
        devices.append(_device(nvml, index))
    return {"driver": _text(nvml.nvmlSystemGetDriverVersion()), "devices": devices}


def _device(nvml: Any, index: int) -> dict[str, Any]:
    """Facts of one device, or `lost` with the reason."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return {"index": index, "lost": str(error)}
    facts: dict[str, Any] = {"index": index, "name": name}

    def ask(
        key: str, function: str, *arguments: Any, of: Callable[[Any], Any] = lambda x: x
    ) -> None:
        try:
            facts[key] = of(getattr(nvml, function)(handle, *arguments))
        except (nvml.NVMLError, AttributeError):
            return

    ask("uuid", "nvmlDeviceGetUUID", of=_text)
    ask("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE)
    ask("remapped", "nvmlDeviceGetRemappedRows", of=lambda rows: [int(n) for n in rows])
    ask("temperature_c", "nvmlDeviceGetTemperature", TEMPERATURE_GPU)
    ask("slowdown_c", "nvmlDeviceGetTemperatureThreshold", THRESHOLD_SLOWDOWN)
    ask("throttle", "nvmlDeviceGetCurrentClocksThrottleReasons", of=_throttle)
    ask("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth")
    ask("pcie_width_most", "nvmlDeviceGetMaxPcieLinkWidth")
    ask("memory_used_bytes", "nvmlDeviceGetMemoryInfo", of=lambda info: int(info.used))
    ask("memory_bytes", "nvmlDeviceGetMemoryInfo", of=lambda info: int(info.total))
    facts["nvlinks"] = _nvlinks(nvml, handle)
    return facts


def _nvlinks(nvml: Any, handle: Any) -> int:
    """Links that are up."""
    active = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            active += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == 1)
        except (nvml.NVMLError, AttributeError):
            break
    return active


def _throttle(reasons: int) -> list[str]:
    return [name for bit, name in THROTTLE.items() if reasons & bit]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
