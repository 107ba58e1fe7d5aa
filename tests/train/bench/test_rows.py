"""The fields of a row's machine, read without a CUDA context beside those of the ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megascale.env import first_visible_gpu
from megascale.train.bench.rows import Origin

Patch = pytest.MonkeyPatch
MAKE_A_CONTEXT = (
    "init",
    "_lazy_init",
    "get_device_name",
    "get_device_properties",
    "current_device",
)
CLOCKS = {"clocks.sm": 1980, "clocks.mem": 3201, "power.draw": 130.5, "temperature.gpu": 38}


@pytest.fixture(autouse=True)
def no_context(monkeypatch: Patch) -> None:
    """Calls that open a GPU are errors; NCCL's version is a constant of the library."""

    def opened(*_: Any) -> None:
        raise AssertionError("a CUDA context was made")

    for name in MAKE_A_CONTEXT:
        monkeypatch.setattr(torch.cuda, name, opened)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


def _nvml(asked: list[object]) -> ModuleType:
    """The driver's library as far as it is used."""

    class NVMLError(Exception):
        pass

    def handle(gpu: object) -> str:
        asked.append(gpu)
        if gpu == "GPU-gone":
            raise NVMLError
        return "handle"

    module = ModuleType("pynvml")
    vars(module).update(
        NVMLError=NVMLError,
        NVML_CLOCK_SM="sm",
        NVML_CLOCK_MEM="mem",
        NVML_TEMPERATURE_GPU="gpu",
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetName=lambda _handle: b"NVIDIA H200",
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetClockInfo=lambda _handle, which: CLOCKS[f"clocks.{which}"],
        nvmlDeviceGetPowerUsage=lambda _handle: 130500,
        nvmlDeviceGetTemperature=lambda _handle, _which: 38,
    )
    return module


@pytest.mark.parametrize(
    ("visible", "gpu"), [(None, 0), ("3,1", 3), ("GPU-ab,GPU-cd", "GPU-ab"), ("", 0)]
)
def test_by_the_driver_s_library(monkeypatch: Patch, visible: str | None, gpu: object) -> None:
    asked: list[object] = []
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(asked))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    row = Origin({"num_devices": 2}, on_gpus=True).now()
    assert (row["device"], row["num_devices"]) == ("NVIDIA H200", 2)
    assert row["machine"] == {"driver_version": "580.1", **CLOCKS, "nccl": "2.28.9"}
    assert asked == [gpu]


def test_by_nvidia_smi(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--id=2*) echo "NVIDIA H200, 580.1, 1980, 3201, 130.50, 38";; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    row = Origin({}, on_gpus=True).now()
    assert row["device"] == "NVIDIA H200"
    assert row["machine"]["clocks.sm"] == "1980"


def test_a_gpu_that_nobody_knows_is_called_unknown(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml([]))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-gone")
    assert Origin({}, on_gpus=True).now()["device"] == "unknown"


def test_a_cpu_asks_nobody() -> None:
    row = Origin({}, on_gpus=False).now()
    assert row["device"] == "cpu"
    assert "machine" not in row


def test_the_first_gpu_that_cuda_shows() -> None:
    assert first_visible_gpu({}) == "0"
    assert first_visible_gpu({"CUDA_VISIBLE_DEVICES": " 5 ,1"}) == "5"
