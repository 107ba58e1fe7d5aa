"""NVML as it answered on real machines: what agents and self-checks make of that.

A file of `recorded_nvml/` a machine (`tools/record_nvml.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.cluster.agent.device_child import THROTTLE, Nvml
from megascale.cluster.messages import DeviceReport
from megascale.cluster.selfcheck.gpus import judge_gpus
from megascale.cluster.selfcheck.nvml import read_nvml
from megascale.cluster.selfcheck.process import Outcome
from tools.record_nvml import Recorder, record

FILES = sorted(Path(__file__).with_name("recorded_nvml").glob("*.json"))
MOMENTS = [
    pytest.param(file, moment, id=f"{file.stem}-{moment}")
    for file in FILES
    for moment in json.loads(file.read_text())["moments"]
]


class Replayed:
    """Answers as recorded. A call that was not recorded is a failure: record the file again."""

    class NVMLError(Exception):
        pass

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        links = [call["arguments"][1] for call in calls if "NvLink" in call["function"]]
        self.NVML_NVLINK_MAX_LINKS = 1 + max(links, default=-1)
        self._answers: dict[str, list[dict[str, Any]]] = {}
        for call in calls:
            self._answers.setdefault(self._key(call["function"], call["arguments"]), []).append(
                call
            )

    @staticmethod
    def _key(function: str, arguments: list[Any]) -> str:
        return json.dumps([function, arguments])

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            answers = self._answers.get(self._key(name, list(arguments)))
            assert answers, f"{name}{arguments} was not recorded"
            entry = answers[0] if len(answers) == 1 else answers.pop(0)
            if "error" in entry:
                raise self.NVMLError(entry["error"])
            answer = entry["answer"]
            return SimpleNamespace(**answer) if isinstance(answer, dict) else answer

        return call


def _calls(file: Path, moment: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = json.loads(file.read_text())["moments"][moment]
    return calls


def test_there_is_one() -> None:
    assert FILES


@pytest.mark.parametrize(("file", "moment"), MOMENTS)
def test_what_an_agent_reports_of_it(file: Path, moment: str) -> None:
    content = json.loads(file.read_text())
    devices = Nvml(Replayed(_calls(file, moment))).read()
    assert devices
    for index, facts in enumerate(devices):
        assert facts.pop("name") == content["device"]
        report = DeviceReport.model_validate(facts)
        assert (report.index, report.answered, report.xid) == (index, True, [])
        assert report.uuid == f"GPU-{index:08d}"
        assert report.ecc_uncorrected == 0
        assert 0 < (report.temperature_c or 0) < 100, "C"
        assert 20 < (report.power_w or 0) < 1500, "W, NVML tells mW"
        assert 100 < (report.sm_clock_mhz or 0) < 5000, "MHz"
        assert (report.memory_used_bytes or 0) > 1 << 20
        assert set(report.throttle) <= set(THROTTLE.values())


@pytest.mark.parametrize(("file", "moment"), MOMENTS)
def test_a_self_check_finds_these_gpus_well(file: Path, moment: str) -> None:
    found = read_nvml(Replayed(_calls(file, moment)), lambda _what: None)
    num = len(found["devices"])
    check = judge_gpus(Outcome(0.1, {"device_files": num, **found}), num)
    assert check.ok, check.reason
    assert check.detail["driver"] == json.loads(file.read_text())["driver"]
    for device in found["devices"]:
        assert {"uuid", "temperature_c", "throttle", "memory_bytes"} <= device.keys(), device
        assert device["memory_used_bytes"] < device["memory_bytes"]


@pytest.mark.parametrize(("file", "moment"), MOMENTS)
def test_the_recorder_writes_what_it_was_answered(file: Path, moment: str) -> None:
    calls = _calls(file, moment)
    assert record(Replayed(calls)) == calls


class _Library:
    """A GPU as the library tells of it: opaque handles, bytes, structures, serial numbers."""

    NVMLError = Replayed.NVMLError
    handles = (object(), object())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return self.handles[index]

    def nvmlDeviceGetName(self, handle: object) -> bytes:
        return f"GPU {self.handles.index(handle)}".encode()

    def nvmlDeviceGetUUID(self, handle: object) -> str:
        return "GPU-7b1c0de5"

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(used=3, total=5, free=2, version=1)

    def nvmlDeviceGetRemappedRows(self, handle: object) -> tuple[int, ...]:
        raise self.NVMLError("Not Supported")


def test_what_is_kept_of_handles_structures_and_serial_numbers() -> None:
    nvml = Recorder(_Library())
    nvml.nvmlDeviceGetHandleByIndex(0)
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    assert nvml.nvmlDeviceGetName(handle) == b"GPU 1", "who asks gets the answer itself"
    assert nvml.nvmlDeviceGetUUID(handle) == "GPU-7b1c0de5"
    nvml.nvmlDeviceGetMemoryInfo(handle)
    with pytest.raises(_Library.NVMLError):
        nvml.nvmlDeviceGetRemappedRows(handle)
    assert [call["arguments"] for call in nvml.calls[2:]] == [["gpu 1"]] * 4
    kept = [call.get("answer", call.get("error")) for call in nvml.calls[2:]]
    assert kept == ["GPU 1", "GPU-00000001", {"used": 3, "total": 5}, "Not Supported"]
    assert "7b1c0de5" not in json.dumps(nvml.calls)
