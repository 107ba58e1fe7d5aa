"""What devices, links and the kernel's log say about a node's health. Pure but for its memory.

Certain: Xids that mean the device and not the program, uncorrected ECC errors that grow, a device
that NVML lost, a process that nobody can end, a link that went down twice (`links.py`). Not
certain: a link that went down once, a line of the kernel's log about one.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from megascale.cluster.driver.links import Links
from megascale.cluster.messages import DeviceReport, Heartbeat
from megascale.cluster.transitions import Found, HardwareSeen

# NVIDIA's Xid catalogue: those whose advice is to reset, repair or replace. Others (13, 31, 43, 45)
# are mostly the program's own.
FATAL_XIDS = {
    46: "the GPU stopped processing",
    48: "double-bit ECC error",
    61: "internal micro-controller halt",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    95: "uncontained ECC error",
    109: "context switch timed out",
    119: "the GPU's system processor timed out",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
}
# Rules of the kernel's log (`agent/log_rules.py`) that speak of the machine -> kind.
_KERNEL_RULES = {
    "xid": "xid",
    "ecc": "ecc_uncorrected",
    "device_lost": "device_lost",
    "machine_check": "machine_check",
    "link": "nic_link",
}
SILENT_LIMIT = 5  # heartbeats in which NVML did not answer for a device


@dataclass
class _Memory:
    ecc: dict[int, int] = field(default_factory=dict)
    silent: dict[int, int] = field(default_factory=dict)
    links: Links = field(default_factory=Links)
    told: set[str] = field(default_factory=set)


class Hardware:
    """Remembers the counters of each incarnation; a certain sign is told once."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, str], _Memory] = {}

    def forget_all_but(self, nodes: Set[str]) -> None:
        self._memory = {key: of for key, of in self._memory.items() if key[0] in nodes}

    def look(self, heartbeat: Heartbeat, at_s: float) -> Iterator[HardwareSeen | Found]:
        if not (heartbeat.devices or heartbeat.nics or heartbeat.ranks or heartbeat.log):
            return
        key = (heartbeat.node, heartbeat.incarnation)
        memory = self._memory.get(key)
        if memory is None:
            for old in [one for one in self._memory if one[0] == heartbeat.node]:
                del self._memory[old]
            memory = self._memory[key] = _Memory()
        signs = [*self._devices(memory, heartbeat.devices)]
        stuck = [rank for rank in heartbeat.ranks if rank.state == "unkillable"]
        if stuck:
            told = ", ".join(f"rank {rank.rank} (pid {rank.pid})" for rank in stuck)
            signs.append(("unkillable", f"{told}: does not end", True))
        signs += [
            (_KERNEL_RULES[match.rule], match.line[:300], match.rule != "link")
            for match in heartbeat.log
            if match.rank is None and match.rule in _KERNEL_RULES
        ]
        for kind, detail, certain in signs:
            if certain and kind in memory.told:
                continue
            if certain:
                memory.told.add(kind)
            ranks = tuple(rank.rank for rank in stuck) if kind == "unkillable" else ()
            yield HardwareSeen(heartbeat.node, kind, detail, certain, ranks)
        yield from memory.links.look(heartbeat, at_s)

    def _devices(
        self, memory: _Memory, devices: list[DeviceReport]
    ) -> Iterator[tuple[str, str, bool]]:
        for device in devices:
            fatal = [xid for xid in device.xid if xid in FATAL_XIDS]
            if fatal:
                told = f"GPU {device.index}: Xid {fatal[0]}, {FATAL_XIDS[fatal[0]]}"
                yield "xid", told, True
            before = memory.ecc.get(device.index)
            now = device.ecc_uncorrected
            if now is not None:
                memory.ecc[device.index] = now
                if before is not None and now > before:
                    told = f"GPU {device.index}: uncorrected ECC errors {before} -> {now}"
                    yield "ecc_uncorrected", told, True
            silent = 0 if device.answered else memory.silent.get(device.index, 0) + 1
            memory.silent[device.index] = silent
            if silent == SILENT_LIMIT:
                yield "device_lost", f"GPU {device.index}: NVML has not answered", True
