"""The kernel's log and its counter of processes that it ended for memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megascale.cluster.agent.kernel import KernelLog, OutOfMemoryCounter, killed_pid
from tests.cluster.agent.conftest import Ordered, StartAgent
from tests.cluster.agent.fake_driver import FakeDriver

MEMORY = Path("/sys/fs/cgroup/memory")


def test_lines_that_come_after_it_was_opened(tmp_path: Path) -> None:
    file = tmp_path / "kmsg"
    file.write_text("6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, old\n")
    log = KernelLog(file)
    assert log.read() == []
    with file.open("a") as more:
        more.write("4,9,81,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n")
        more.write("6,10,82,-;eth0: renamed\n3,11,83,-;Out of memory: Killed process 41")
    (xid,) = log.read()
    assert xid.rule.name == "xid"
    assert xid.line.startswith("NVRM: Xid")
    with file.open("a") as more:
        more.write("27 (python3) total-vm:9kB\n")
    (killed,) = log.read()
    assert killed_pid(killed) == 4127
    log.close()
    assert log.read() == []
    assert KernelLog(tmp_path / "none").read() == []


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("4:memory:/job/a", "memory/job/a/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("4:memory:/elsewhere", "memory/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("0::/job/a", "job/a/memory.events", "oom 1\noom_kill {}\noom_group_kill 0\n"),
    ],
)
def test_both_versions_of_the_counter(
    line: str, file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text.format(2))
    counter = OutOfMemoryCounter(os.getpid(), tmp_path)
    real = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, **k: f"3:cpu:/x\n{line}\n" if self.name == "cgroup" else real(self, **k),
    )
    counter.look()
    counter.look()
    assert counter.rose_s is None
    path.write_text(text.format(3))
    counter.look()
    assert counter.rose_s is not None


EATS = """
import os, time
with open("GROUP/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
time.sleep(1.5)
eaten = [bytearray(os.urandom(1 << 20)) for _ in range(256)]
time.sleep(600)
"""


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="no writable cgroup v1 memory")
@pytest.mark.parametrize("kernel_log", ["/dev/kmsg", "/nowhere"])
def test_a_real_end_for_memory(
    kernel_log: str, driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    group = MEMORY / f"agent-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(96 << 20))
        start_agent("--kernel-log", kernel_log)
        driver.order(ordered(EATS.replace("GROUP", str(group))))
        failure = driver.rank(0, state="exited").failure
        assert failure is not None
        assert (failure.kind, failure.signal) == ("out_of_memory", "SIGKILL")
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    give_up = time.monotonic() + 5.0
    while True:
        try:
            return group.rmdir()
        except OSError:
            assert time.monotonic() < give_up
            time.sleep(0.05)
