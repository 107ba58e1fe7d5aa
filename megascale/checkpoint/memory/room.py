"""What memory the slots of a node's ranks need, and whether it is there, before any is taken.

A slot file counts twice: as space of the file system it lies in (/dev/shm has a size of its own,
half of the memory where nobody chose) and as memory of the machine, or of the control group that
the ranks are in. What slots hold already is counted as there. 5 % of what is available stays free:
training goes on needing memory. `judge` is pure; `available` asks the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30

_MARGIN = 0.05  # of what is available


@dataclass(frozen=True)
class Available:
    """Bytes that this rank sees free.

    held_bytes    what its slot files hold already
    shm_bytes     None: its slots lie in no file system
    memory_bytes  of machine or control group
    """

    held_bytes: int
    shm_bytes: int | None
    memory_bytes: int


@dataclass(frozen=True)
class Need:
    """Of one rank, in bytes: `num_own` slots of its own state, `num_copies` of a partner's."""

    node: str
    own_bytes: int
    num_own: int
    copy_bytes: int
    num_copies: int

    @property
    def total_bytes(self) -> int:
        return self.own_bytes * self.num_own + self.copy_bytes * self.num_copies


def per_node(needs: Sequence[Need]) -> dict[str, int]:
    """Bytes that the slots of all ranks of a node take."""
    totals: dict[str, int] = {}
    for need in needs:
        totals[need.node] = totals.get(need.node, 0) + need.total_bytes
    return totals


def describe_need(needs: Sequence[Need]) -> str:
    """One line for the person who relies on it: the node that needs most."""
    totals = per_node(needs)
    node = max(totals, key=lambda name: totals[name])
    of_node = [need for need in needs if need.node == node]
    own = max(need.own_bytes for need in of_node)
    num_own, num_copies = of_node[0].num_own, max(need.num_copies for need in of_node)
    copies = f" and {num_copies} of a partner's" if num_copies else ""
    return (
        f"memory slots take {_gib(totals[node])} of a node's memory: {len(of_node)} rank(s), each "
        f"{num_own} slot(s) of {_gib(own)}{copies}"
    )


def judge(needs: Sequence[Need], available: Sequence[Available]) -> str | None:
    """Why they do not fit, with what to do; None where they fit. Of each rank, by rank."""
    for node, total in per_node(needs).items():
        ranks = [rank for rank, need in enumerate(needs) if need.node == node]
        held = sum(available[rank].held_bytes for rank in ranks)
        free_shm = [s for rank in ranks if (s := available[rank].shm_bytes) is not None]
        memory = min(available[rank].memory_bytes for rank in ranks)
        missing = total - held
        own_alone = sum(needs[rank].own_bytes * needs[rank].num_own for rank in ranks) - held
        for what, free, remedy in (
            (
                "/dev/shm has",
                min(free_shm, default=None),
                "make it larger (containers: --shm-size)",
            ),
            ("the memory has", int(memory * (1 - _MARGIN)), "use nodes with more memory"),
        ):
            if free is None or missing <= free:
                continue
            smaller = (
                f", or set checkpoint.memory_copies = false, which needs {_gib(own_alone)}"
                if own_alone <= free and own_alone < missing
                else ", or set checkpoint.memory_interval = 0"
            )
            return (
                f"{describe_need([needs[rank] for rank in ranks])}; {_gib(missing)} more are "
                f"needed, {what} {_gib(free)} free on node {node}; {remedy}{smaller}"
            )
    return None


def available(
    held_bytes: int,
    folder: Path | None,
    *,
    meminfo: Path = Path("/proc/meminfo"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> Available:
    """What this rank sees. `folder`: of its slot files, None where they have none."""
    shm = None
    if folder is not None:
        space = os.statvfs(folder)
        shm = space.f_bavail * space.f_frsize
    limits = [_mem_available(meminfo), *_group_room(cgroups)]
    return Available(held_bytes, shm, min(limits))


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise AssertionError(f"{meminfo} has no MemAvailable")  # there since Linux 3.14


def _group_room(cgroups: Path) -> Iterable[int]:
    """What a container may still take: limit less use, of version 2 or 1 of control groups, as its
    own root shows them. Pages of files that can be dropped are no use."""
    for limit, used, stat, droppable in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            texts = [(cgroups / name).read_text() for name in (limit, used, stat)]
        except OSError:
            continue
        if texts[0].strip() == "max":
            continue
        fields = dict(line.split()[:2] for line in texts[2].splitlines())
        yield max(int(texts[0]) - int(texts[1]) + int(fields.get(droppable, 0)), 0)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.2f} GiB" if num_bytes >= _GIB / 100 else f"{num_bytes:,} bytes"
