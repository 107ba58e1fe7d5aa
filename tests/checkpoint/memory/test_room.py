"""What slots need of a node is added up and compared with what is there before any is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory import MemorySlots, allocation
from megascale.checkpoint.memory.room import (
    Available,
    Need,
    available,
    describe_need,
    judge,
    per_node,
)
from megascale.topology import Mesh
from tests.checkpoint.layouts import whole
from tests.checkpoint.memory.test_slots import memory

__all__ = ["memory"]
GIB = 1 << 30
# Two nodes of two ranks; on the second every rank has a third slot, and the partners' are larger.
NEEDS = [Need("a", 10 * GIB, 2, 12 * GIB, 2)] * 2 + [Need("b", 12 * GIB, 3, 10 * GIB, 2)] * 2
PLENTY = Available(0, 200 * GIB, 400 * GIB)


def test_a_node_needs_the_slots_of_all_its_ranks() -> None:
    assert per_node(NEEDS) == {"a": 88 * GIB, "b": 112 * GIB}
    assert describe_need(NEEDS) == (
        "memory slots take 112.00 GiB of a node's memory: 2 rank(s), each 3 slot(s) of 12.00 GiB "
        "and 2 of a partner's"
    )


def test_what_fits_is_taken() -> None:
    assert judge(NEEDS, [PLENTY] * 4) is None
    exactly = replace(PLENTY, shm_bytes=112 * GIB)
    assert judge(NEEDS, [PLENTY, PLENTY, exactly, exactly]) is None
    assert judge(NEEDS, [PLENTY] * 2 + [replace(exactly, shm_bytes=112 * GIB - 1)] * 2) is not None


def test_a_full_file_system_is_told_with_what_would_fit() -> None:
    small = replace(PLENTY, shm_bytes=80 * GIB)
    assert judge(NEEDS, [PLENTY, PLENTY, small, small]) == (
        "memory slots take 112.00 GiB of a node's memory: 2 rank(s), each 3 slot(s) of 12.00 GiB "
        "and 2 of a partner's; 112.00 GiB more are needed, /dev/shm has 80.00 GiB free on node b; "
        "make it larger (containers: --shm-size), or set checkpoint.memory_copies = false, which "
        "needs 72.00 GiB"
    )
    smaller = replace(PLENTY, shm_bytes=71 * GIB)
    why = judge(NEEDS, [PLENTY, PLENTY, smaller, smaller])
    assert why is not None
    assert why.endswith("or set checkpoint.memory_interval = 0")


def test_memory_counts_beside_the_file_system_and_a_part_stays_free() -> None:
    tight = replace(PLENTY, memory_bytes=117 * GIB)  # 95 % of it are 111.15
    why = judge(NEEDS, [PLENTY, PLENTY, PLENTY, tight])
    assert why is not None
    assert "the memory has 111.15 GiB free on node b" in why
    assert judge(NEEDS, [PLENTY] * 3 + [replace(tight, memory_bytes=118 * GIB)]) is None
    no_files = replace(PLENTY, shm_bytes=None)
    assert judge(NEEDS, [no_files] * 4) is None


def test_what_slots_hold_already_is_not_needed_again() -> None:
    restarted = Available(56 * GIB, 0, GIB)
    assert judge(NEEDS, [PLENTY, PLENTY, restarted, restarted]) is None


@pytest.mark.parametrize(
    ("files", "memory_bytes"),
    [
        ({}, 4096 * 1024),
        ({"memory.max": "max\n", "memory.current": "5", "memory.stat": ""}, 4096 * 1024),
        (
            {
                "memory.max": "1000000",
                "memory.current": "700000",
                "memory.stat": "anon 5\ninactive_file 100000\n",
            },
            400_000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "2000000",
                "memory/memory.usage_in_bytes": "1900000",
                "memory/memory.stat": "total_inactive_file 50000\n",
            },
            150_000,
        ),
    ],
)
def test_the_least_of_machine_and_container_counts(
    tmp_path: Path, files: dict[str, str], memory_bytes: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable:    4096 kB\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    found = available(7, None, meminfo=meminfo, cgroups=tmp_path / "cgroup")
    assert found == Available(7, None, memory_bytes)


def test_this_machine_is_asked(memory: Path) -> None:
    found = available(0, memory)
    assert found.shm_bytes is not None
    assert found.shm_bytes > 0
    assert found.memory_bytes > 0


def test_a_run_without_room_says_so_once_takes_nothing_and_goes_on(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(allocation, "available", lambda *_: Available(0, 1000, 1 << 40))
    values = torch.zeros(1000)
    slots = MemorySlots(
        str(memory / "slots"),
        [whole("master/a", values)],
        [],
        Mesh(),
        Ranks(None),
        identity="run",
        epoch=1,
        device=values.device,
    )
    assert slots.bytes_needed == 2 * (4096 + 4096 + 4000)
    assert "24,384 bytes of a node's memory" in slots.describe_memory()
    for step in (1, 2):
        slots.begin(step, step)
        assert slots.hold() is None
        slots.before_update()
        slots.settled()
    assert caplog.text.count("training goes on without memory slots: memory slots take") == 1
    assert "/dev/shm has 1,000 bytes free" in caplog.text
    assert list(memory.iterdir()) == []
