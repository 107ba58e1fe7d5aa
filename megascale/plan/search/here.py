"""The GPU of this machine by name, as its driver tells it; no CUDA context, which takes 500 MB."""

from __future__ import annotations

import importlib
import subprocess


def gpu_name() -> str | None:
    """Of the first GPU, by NVML or nvidia-smi; None where neither knows one."""
    return _by_nvml() or _by_smi()


def _by_nvml() -> str | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
    except nvml.NVMLError:
        return None
    return name.decode() if isinstance(name, bytes) else str(name)


def _by_smi() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
