"""What agents see in place of devices is read by the very code that reads the real ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale.cluster.agent.device_child import FakeNvml, Nvml
from megascale.cluster.agent.kernel import KernelLog
from megascale.cluster.agent.nics import Nics
from megascale.cluster.chaos import cgroups
from megascale.cluster.chaos.agent import put_clock_forward
from megascale.cluster.chaos.faults import KINDS, kind_named, missing
from megascale.cluster.chaos.rig import PORT, Rig
from megascale.errors import ConfigError


def test_gpus_are_healthy_until_they_are_not(tmp_path: Path) -> None:
    host = Rig(tmp_path).host("node0")
    host.make()
    nvml = Nvml(FakeNvml(host.devices))
    first = nvml.read()
    assert [device["ecc_uncorrected"] for device in first] == [0, 0]
    assert [device["xid"] for device in first] == [[], []]
    host.change_devices(xids=[[1, 79]], ecc=3)
    sick = nvml.read()
    assert [device["xid"] for device in sick] == [[], [79]]
    assert [device["ecc_uncorrected"] for device in sick] == [3, 0]
    host.make()  # the host comes back
    assert json.loads(host.devices.read_text())["xids"] == [[1, 79]], "as sick as it went"


def test_a_port_goes_down_and_up(tmp_path: Path) -> None:
    host = Rig(tmp_path).host("node0")
    host.make()
    nics = Nics(host.sys)
    assert [nic.name for nic in nics.read()] == [PORT], "not what other programs send"
    host.make(own_network=True)
    ports = {nic.name: nic for nic in nics.read()}
    assert (host.sys / "fs").samefile("/sys/fs"), "where the memory of a rank is counted"
    assert ports[PORT].up
    assert ports[PORT].settings["rate"] == "400 Gb/sec (4X NDR)"
    host.write_port("ports/1/state", "1: DOWN")
    assert not {nic.name: nic for nic in nics.read()}[PORT].up
    host.write_port("ports/1/state", "4: ACTIVE")
    assert {nic.name: nic for nic in nics.read()}[PORT].flaps == 1


def test_a_line_of_the_kernel(tmp_path: Path) -> None:
    host = Rig(tmp_path).host("node0")
    host.make()
    log = KernelLog(host.kernel_log)
    host.log("mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: fatal")
    assert [match.rule.name for match in log.read()] == ["machine_check"]
    log.close()


def test_what_the_next_agent_takes_is_taken_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for name in ("node0", "node1"):
        rig.host(name).make()
    rig.next_agent.write_text('{"selfcheck_fault": "memory"}')
    assert rig.take_next("node1") == {"selfcheck_fault": "memory"}
    assert rig.take_next("node0") == {}


def test_a_wall_clock_is_put_forward_and_the_monotonic_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Rig(tmp_path).host("node0")
    host.make()
    real, before_s = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", real)  # put back at the end
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    host.clock.write_text("3600")
    put_clock_forward(host)
    assert 3599 < time.time() - real() < 3601
    assert 3599e9 < time.time_ns() - real() * 1e9 < 3601e9
    assert time.monotonic() - before_s < 5


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sigstop'"):
        kind_named("sigstp")
    assert missing("kill") == ""
    assert {need for kind in KINDS.values() for need in kind.needs} == {
        *("root", "namespaces", "cgroup memory", "cgroup freezer")
    }


@pytest.mark.skipif(not cgroups.is_writable("freezer"), reason="needs a writable cgroup v1 freezer")
def test_a_frozen_process_is_thawed_and_its_group_removed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    group = cgroups.Group("freezer", f"test-{child.pid}")
    try:
        group.take([child.pid])
        group.freeze()
        child.kill()
        time.sleep(0.2)
        assert child.poll() is None, "it took SIGKILL while it was frozen"
    finally:
        group.remove()
    assert child.wait(5.0) == -signal.SIGKILL
    assert not group.folder.exists()
    group.remove()
