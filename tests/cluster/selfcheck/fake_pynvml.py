"""Stands in for `pynvml` in the probe's process; what its GPUs say comes from a JSON file.

Copied as pynvml.py into a folder of PYTHONPATH, beside gpus.json: {"init": "ok" | "fail" | "hang",
"gpus": [{FUNCTION: value}]}. A function that a GPU does not name is not supported.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

STATE = json.loads(Path(__file__).with_name("gpus.json").read_text())


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    if STATE["init"] == "hang":
        time.sleep(600)
    if STATE["init"] == "fail":
        raise NVMLError("Driver Not Loaded")


def nvmlSystemGetDriverVersion() -> str:
    return "580.1"


def nvmlDeviceGetCount() -> int:
    return len(STATE["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    gpu: dict[str, Any] = STATE["gpus"][index]
    if "lost" in gpu:
        raise NVMLError("GPU is lost")
    return gpu


def nvmlDeviceGetName(_handle: dict[str, Any]) -> bytes:
    return b"NVIDIA H200"


def nvmlDeviceGetNvLinkState(handle: dict[str, Any], link: int) -> int:
    if link >= handle.get("links", 0):
        raise NVMLError("Invalid Argument")
    return int(link != handle.get("down"))


class _Memory:
    used, total = 1 << 20, 1 << 37


def nvmlDeviceGetMemoryInfo(_handle: dict[str, Any]) -> _Memory:
    return _Memory()


def _answer(name: str) -> Any:
    def ask(handle: dict[str, Any], *_arguments: Any) -> Any:
        if handle.get(name) == "hang":
            time.sleep(600)
        if name not in handle:
            raise NVMLError("Not Supported")
        return handle[name]

    return ask


nvmlDeviceGetUUID = _answer("uuid")
nvmlDeviceGetTotalEccErrors = _answer("ecc")
nvmlDeviceGetRemappedRows = _answer("remapped")
nvmlDeviceGetTemperature = _answer("temperature")
nvmlDeviceGetTemperatureThreshold = _answer("slowdown")
nvmlDeviceGetCurrentClocksThrottleReasons = _answer("throttle")
nvmlDeviceGetCurrPcieLinkWidth = _answer("width")
nvmlDeviceGetMaxPcieLinkWidth = _answer("width_most")
