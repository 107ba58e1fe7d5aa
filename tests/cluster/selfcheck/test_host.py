"""The host's facts against limits, on trees that look like a root."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.selfcheck.expected import load_expected
from megascale.cluster.selfcheck.host import read_host
from megascale.cluster.selfcheck.kernel_log import RECENT_S, match_records
from megascale.cluster.selfcheck.numa import numa_nodes, parse_cpu_list
from megascale.train.selfcheck.throttle import quota_periods

FATAL = (
    "NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:4c:00): 48, pid='<unknown>', An uncorrectable double bit error",
    "NVRM: GPU at PCI:0000:19:00 has fallen off the bus.",
    "mce: [Hardware Error]: Machine check events logged",
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
    "Memory failure: 0x7f3a1: recovery action for dirty LRU page: Recovered",
    "I/O error, dev nvme0n1, sector 4096 op 0x0:(READ)",
    "EXT4-fs error (device sda1): ext4_find_entry:1456: inode #2",
    "mlx5_core 0000:3b:00.0: health compromised - reached max long time",
    "watchdog: BUG: soft lockup - CPU#12 stuck for 23s! [python:99]",
)
NOTES = (
    "NVRM: Xid (PCI:0000:19:00): 31, pid=42, name=python, MMU Fault",
    "NVRM: Xid (PCI:0000:19:00): 13, pid=42, Graphics Exception",
    "NVRM: Xid (PCI:0000:19:00): 43, pid=42, channel 0x10",
    "Out of memory: Killed process 4242 (python) total-vm:1kB",
    "INFO: task python:77 blocked for more than 120 seconds.",
    "mlx5_core 0000:3b:00.0 eth2: Link down",
)
SILENT = (
    "EXT4-fs (vda): mounted filesystem r/w",
    "usb 1-1: new device",
    "EDAC MC0: 1 CE read error",
)


def record(text: str, seconds: float, number: int = 1) -> str:
    return f"4,{number},{int(seconds * 1e6)},-;{text}"


@pytest.mark.parametrize("text", FATAL)
def test_kernel_messages_that_condemn_a_node(text: str) -> None:
    (match,) = match_records([record(text, 100.0)], 200.0)
    assert match.fatal
    assert match.line == text


@pytest.mark.parametrize("text", NOTES)
def test_kernel_messages_that_only_inform(text: str) -> None:
    (match,) = match_records([record(text, 100.0)], 200.0)
    assert not match.fatal


@pytest.mark.parametrize("text", SILENT)
def test_kernel_messages_that_say_nothing(text: str) -> None:
    assert match_records([record(text, 100.0)], 200.0) == []


def test_old_messages_and_continuations_do_not_count() -> None:
    records = [record(FATAL[0], 100.0), " SUBSYSTEM=pci", "junk", record(FATAL[0], 5000.0, 2)]
    (match,) = match_records(records, 100.0 + RECENT_S + 1)
    assert match.count == 1
    assert match_records(records, 100.0 + RECENT_S - 1)[0].count == 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A healthy host."""
    files = {
        "proc/meminfo": "MemTotal: 1000000 kB\nMemFree: 10 kB\nMemAvailable: 900000 kB\n",
        "proc/vmstat": "nr_free_pages 3\noom_kill 2\n",
        "proc/loadavg": "0.50 0.40 0.30 1/100 4242\n",
        "dev/kmsg": record("all is well", 1.0) + "\n",
        "dev/shm/.keep": "",
    }
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def read(root: Path, **limits: float) -> dict[str, Any]:
    arguments = {
        "root": str(root),
        "run_dir": str(root / "run"),
        "limits": {**load_expected().host, **limits},
    }
    return read_host(arguments, lambda _at: None)


def test_a_healthy_host_has_notes_and_no_failures(root: Path) -> None:
    found = read(root)
    assert found["failures"] == []
    assert found["notes"]["oom_kills_since_boot"] == 2
    assert found["notes"]["memory_free_bytes"] == 900_000 * 1024
    assert list((root / "run/selfcheck").iterdir()) == [], "the probe's file is gone"


def failures(root: Path, **limits: float) -> str:
    (only,) = read(root, **limits)["failures"]
    return str(only)


def test_little_memory(root: Path) -> None:
    file = root / "proc/meminfo"
    file.write_text(file.read_text().replace("900000", "40000"))
    assert "of memory are free; at least 5%" in failures(root)


def test_much_load(root: Path) -> None:
    (root / "proc/loadavg").write_text(f"{17 * len(os.sched_getaffinity(0))}.0 0 0 1/1 1\n")
    assert "load of the last minute" in failures(root)


def test_little_room(root: Path) -> None:
    assert "GiB are free in" in failures(root, least_run_folder_free_bytes=1e18)
    assert "dev/shm" in failures(root, least_shm_free_bytes=1e18)
    (root / "dev/shm/.keep").unlink()
    (root / "dev/shm").rmdir()
    assert "cannot be read" in failures(root)


def test_few_descriptors(root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
    try:
        assert "may open 900 files" in failures(root)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_folder_that_cannot_be_written(root: Path) -> None:
    (root / "run").write_text("a file")
    assert "cannot be written" in failures(root)


def test_a_clock_that_was_never_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.cluster.selfcheck.host.time.time", lambda: 3600.0)
    assert "the clock says 1970-01-01" in "; ".join(read(root)["failures"])


def test_the_kernels_word_counts_and_silence_is_a_note(root: Path) -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    (root / "dev/kmsg").write_text("\n".join(record(FATAL[0], uptime - 5, i) for i in range(3)))
    assert "the kernel said 3 times within an hour (gpu_xid)" in failures(root)
    (root / "dev/kmsg").unlink()
    assert read(root)["failures"] == []
    assert "not readable" in read(root)["notes"]["kernel_log"]


def test_memory_nodes_and_their_cpus(tmp_path: Path) -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    for node, cpus in ((0, "0-3"), (1, "4-7"), (2, "")):  # node 2 has memory alone
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    assert numa_nodes(tmp_path, {1, 2, 5}) == {0: [1, 2], 1: [5]}
    assert numa_nodes(tmp_path / "none", {1, 2}) == {0: [1, 2]}


@pytest.mark.parametrize(
    ("groups", "place", "counters"),
    [
        ("2:cpuacct:/\n1:cpu:/job\n0::/\n", "cpu/job", "nr_periods 9\nnr_throttled 7"),
        ("4:cpu,cpuacct:/job\n", "cpu,cpuacct/job", "nr_periods 9\nnr_throttled 7"),
        ("0::/job\n", "job", "usage_usec 5\nnr_periods 9\nnr_throttled 7\nthrottled_usec 3"),
    ],
)
def test_periods_of_a_quota(tmp_path: Path, groups: str, place: str, counters: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    assert quota_periods(tmp_path) == (0, 0)
    folder = tmp_path / "sys/fs/cgroup" / place
    folder.mkdir(parents=True)
    (folder / "cpu.stat").write_text(counters + "\n")
    assert quota_periods(tmp_path) == (9, 7)
