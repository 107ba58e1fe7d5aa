"""RDMA ports of one node that go down: an alert at the first time, certain at the second within
five minutes, and a word when they are up again.

A link that is down for some seconds and comes back costs nothing: RDMA retransmits, nobody is
stopped, and what is told is that it flaps. How many are too many `flapping_links` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from megascale.cluster.messages import Heartbeat, NicReport
from megascale.cluster.transitions import Found, HardwareSeen
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.nic_settings import WITHIN_S, flapping_links

KEPT = 16  # transitions of a port
_LONG_AGO_S = float("-inf")  # transitions before the driver looked


def is_rdma(port: str) -> bool:
    """Ports are named DEVICE/NUMBER, interfaces are not (`agent/nics.py`)."""
    return "/" in port


@dataclass
class _Link:
    up: bool
    flaps: int
    history: deque[tuple[float, int]]


@dataclass
class Links:
    """Of one incarnation of an agent, which counts transitions since it started."""

    _links: dict[str, _Link] = field(default_factory=dict)

    def look(self, heartbeat: Heartbeat, at_s: float) -> Iterator[HardwareSeen | Found]:
        for nic in heartbeat.nics:
            if is_rdma(nic.name):
                yield from self._one(heartbeat, nic, at_s)

    def _one(
        self, heartbeat: Heartbeat, nic: NicReport, at_s: float
    ) -> Iterator[HardwareSeen | Found]:
        link = self._links.get(nic.name)
        if link is None:
            history = deque([(_LONG_AGO_S, nic.flaps)], maxlen=KEPT)
            self._links[nic.name] = _Link(nic.up, nic.flaps, history)
            return
        was_up, before = link.up, link.flaps
        link.up, link.flaps = nic.up, nic.flaps
        if nic.flaps == before:
            if nic.up and not was_up:
                yield self._told(heartbeat, nic)
            return
        link.history.append((at_s, nic.flaps))
        ranks_of = {heartbeat.node: [report.rank for report in heartbeat.ranks]}
        for finding in flapping_links({(heartbeat.node, nic.name): link.history}, ranks_of, at_s):
            times = finding.evidence["flaps"][f"{heartbeat.node}/{nic.name}"]
            state = f"up again after {nic.down_s:.1f} s" if nic.up else "down"
            detail = f"{nic.name} went down {times} times in {WITHIN_S:.0f} s, it is {state}"
            yield HardwareSeen(heartbeat.node, f"nic_{nic.name}", detail, finding.certain)
        if nic.up:
            yield self._told(heartbeat, nic)

    def _told(self, heartbeat: Heartbeat, nic: NicReport) -> Found:
        """It is no reason to do anything (`link_flap` has no rung)."""
        ranks = tuple(sorted(report.rank for report in heartbeat.ranks))
        where = f"{heartbeat.node}/{nic.name}"
        evidence = {"flapped": {where: f"down for {nic.down_s:.1f} s, up again"}}
        return Found(Finding("link_flap", ranks, evidence, certain=False))
