"""The host's memory nodes and the CPUs beside them, from sysfs."""

from __future__ import annotations

from pathlib import Path


def numa_nodes(root: Path, allowed: set[int]) -> dict[int, list[int]]:
    """NUMA node to those of its CPUs that this process may use; node 0 where the kernel is mute."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpu_list((folder / "cpulist").read_text())
        if usable := sorted(allowed.intersection(cpus)):
            nodes[int(folder.name.removeprefix("node"))] = usable
    return dict(sorted(nodes.items())) or {0: sorted(allowed)}


def parse_cpu_list(text: str) -> list[int]:
    """'0-3,8' -> [0, 1, 2, 3, 8]"""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
