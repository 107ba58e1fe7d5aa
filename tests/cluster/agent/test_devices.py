"""NVML through a child: values, events, and a driver that never answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.agent import devices
from megascale.cluster.agent.board import Board
from megascale.cluster.agent.device_child import XID_EVENT, FakeNvml, Nvml
from megascale.cluster.agent.devices import DeviceMonitor, NoNvml, NvmlChild
from tests.cluster.agent.conftest import StartAgent, gone_within, of_test
from tests.cluster.agent.fake_driver import FakeDriver

FACTS: dict[str, Any] = {
    "name": "NVIDIA H200",
    "uuid": "GPU-0",
    "temperature_c": 61,
    "power_w": 690.5,
    "sm_clock_mhz": 1980,
    "throttle": 0x44,
    "ecc_uncorrected": 0,
    "memory_used_bytes": 1 << 36,
}


def _write(file: Path, **content: Any) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"devices": [FACTS, {"name": "NVIDIA H200"}], **content}))
    new.replace(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "devices.json"
    _write(path)
    return path


def test_facts_and_what_a_device_does_not_give(file: Path) -> None:
    first, second = Nvml(FakeNvml(file)).read()
    assert first == {
        **FACTS,
        "index": 0,
        "xid": [],
        "throttle": ["sw_power_cap", "hw_thermal"],
    }
    assert second == {"index": 1, "xid": [], "name": "NVIDIA H200"}


def test_an_xid_is_an_event_once(file: Path) -> None:
    nvml = Nvml(FakeNvml(file))
    _write(file, xids=[[1, 79], [1, 48]])
    assert [device["xid"] for device in nvml.read()] == [[], [79, 48]]
    _write(file, xids=[[1, 79], [1, 48], [0, 31]])
    assert [device["xid"] for device in nvml.read()] == [[31], []]


def test_the_library_has_the_functions_that_are_asked_for() -> None:
    pynvml = pytest.importorskip("pynvml")
    asked = [name for name in dir(FakeNvml) if name.startswith("nvml")]
    assert len(asked) >= 13
    assert not [name for name in asked if not hasattr(pynvml, name)]
    assert pynvml.nvmlEventTypeXidCriticalError == XID_EVENT


def test_a_child_that_does_not_answer_is_killed(file: Path) -> None:
    child = NvmlChild(file)
    assert len(child.ask(10.0)) == 2
    _write(file, hang=["nvmlDeviceGetTemperature"])
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        child.ask(0.3)
    assert time.monotonic() - began_s < 1.0
    assert child.end()
    with pytest.raises((OSError, ValueError)):
        child.ask(0.3)


def test_without_nvml_there_are_no_devices_and_no_error() -> None:
    board = Board(tuple)
    monitor = DeviceMonitor(board, None)
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has devices")
    child = NvmlChild(None)
    with pytest.raises(NoNvml):
        child.ask(10.0)
    child.end()
    monitor.start()
    monitor.join(10.0)
    assert not monitor.is_alive(), "it does not ask again"
    assert board.report().devices == []


def test_a_driver_that_hangs_and_recovers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "INTERVAL_S", 0.02)
    monkeypatch.setattr(devices, "AGAIN_S", 0.1)
    board = Board(tuple)
    monitor = DeviceMonitor(board, file, deadline_s=1.0)
    monitor.start()
    try:
        assert monitor.has_answered.wait(10.0)
        assert monitor.names == ["NVIDIA H200"] * 2
        assert board.report().devices[0].temperature_c == 61
        _write(file, hang=["nvmlDeviceGetUUID"])
        _until(lambda: not board.report().devices[0].answered)
        silent = board.report().devices
        assert [(d.index, d.answered, d.temperature_c) for d in silent] == [
            (0, False, None),
            (1, False, None),
        ]
        _write(file)
        _until(lambda: board.report().devices[0].answered)
    finally:
        monitor.end(5.0)
    assert not monitor.is_alive()


def _until(look: Any) -> None:
    give_up = time.monotonic() + 15.0
    while not look():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_an_agent_whose_nvml_hangs_from_the_start_joins_and_beats(
    driver: FakeDriver, start_agent: StartAgent, file: Path
) -> None:
    _write(file, hang=["nvmlInit"])
    start_agent("--fake-devices", str(file))
    driver.wait(lambda: driver.beats and driver.beats[-1].devices, 30.0, "beat with devices")
    assert [device.answered for device in driver.beats[-1].devices] == [False, False]


def test_a_child_that_hangs_ends_with_its_agent(
    driver: FakeDriver, start_agent: StartAgent, file: Path, tmp_path: Path
) -> None:
    agent = start_agent("--fake-devices", str(file))
    driver.wait(lambda: driver.beats, 30.0, "beat")
    _write(file, hang=["nvmlDeviceGetTemperature"])
    time.sleep(1.5)
    assert len(of_test(tmp_path)) == 3, "agent, watchdog, and the child that hangs"
    agent.kill()
    agent.wait()
    gone_within(tmp_path, 10.0)


def test_devices_stand_in_the_join_and_in_beats(
    driver: FakeDriver, start_agent: StartAgent, file: Path
) -> None:
    _write(file, xids=[[0, 79]])
    start_agent("--fake-devices", str(file))
    driver.wait(lambda: driver.beats and driver.beats[-1].devices, 30.0, "beat with devices")
    assert driver.joins[0].facts.devices == ["NVIDIA H200"] * 2
    assert any(beat.devices and beat.devices[0].xid == [79] for beat in driver.beats)
    assert driver.beats[-1].devices[0].power_w == 690.5
