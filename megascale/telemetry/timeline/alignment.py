"""Puts the ranks of a timeline on one clock: what they had to wait for each other says how far
their hosts' clocks are apart (`diagnose/clocks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.telemetry.diagnose.clocks import Clocks, Meetings, align
from megascale.telemetry.shown import counted
from megascale.telemetry.timeline.ends import COLLECTIVE, NONE, RECEIVE, SEND, Columns
from megascale.telemetry.timeline.source import Place

# An anchor of a device's clock errs by about 10 us; so does what it drifts between two of them.
READING_ERROR_NS = 20_000.0


@dataclass(frozen=True)
class Alignment:
    """hosts  in the order of `clocks`; None: they were not compared, and `why`"""

    hosts: tuple[str, ...]
    clocks: Clocks | None
    why: str = ""

    def correction_ns(self, host: str) -> int:
        """What to add to times of `host`; 0 where that is not known."""
        if self.clocks is None:
            return 0
        value = self.clocks.correction_ns_H[self.hosts.index(host)]
        return 0 if np.isnan(value) else round(float(value))

    def as_json(self) -> dict[str, Any]:
        if self.clocks is None:
            return {"aligned": False, "why": self.why}
        clocks = self.clocks
        return {
            "aligned": True,
            "reference": self.hosts[clocks.reference],
            "contradiction_us": round(clocks.contradiction_ns / 1000, 3),
            "unknown_hosts": [self.hosts[number] for number in clocks.unknown],
            "hosts": {
                host: {"correction_us": round(c / 1000, 3), "error_us": round(e / 1000, 3)}
                for host, c, e in zip(
                    self.hosts, clocks.correction_ns_H, clocks.error_ns_H, strict=True
                )
                if not np.isnan(c)
            },
        }

    def __str__(self) -> str:
        """A sentence or two for a person."""
        if self.clocks is None:
            return f"clocks are as they were recorded: {self.why}"
        clocks = self.clocks
        known = np.flatnonzero(~np.isnan(clocks.error_ns_H))
        widest = int(known[np.argmax(clocks.error_ns_H[known])])
        moved = int(known[np.argmax(np.abs(clocks.correction_ns_H[known]))])
        said = (
            f"clocks of {counted(len(known), 'host')} aligned to within "
            f"{clocks.error_ns_H[widest] / 1e6:.3f} ms of {self.hosts[clocks.reference]}'s (the "
            f"least certain is {self.hosts[widest]}'s); the largest correction is "
            f"{clocks.correction_ns_H[moved] / 1e6:+.3f} ms, of {self.hosts[moved]}"
        )
        if clocks.contradiction_ns:
            said += (
                f". Readings contradict each other by {clocks.contradiction_ns / 1e6:.3f} ms, "
                "which the error includes: a clock jumped or drifted; take fewer steps"
            )
        if clocks.unknown:
            names = ", ".join(self.hosts[number] for number in clocks.unknown[:8])
            said += (
                f". Nothing in these steps tells the clocks of "
                f"{counted(len(clocks.unknown), 'host')}, which are as they were recorded: {names}"
            )
        return said


def align_hosts(ends: Mapping[str, Columns], places: Mapping[int, Place | None]) -> Alignment:
    """What the clocks of the hosts lack, from the ends of communication of their ranks."""
    hosts = tuple(sorted({place.host for place in places.values() if place is not None}))
    if len(hosts) < 2:
        return Alignment(hosts, None, "all ranks are on one host" if hosts else "no host is known")
    number = {host: i for i, host in enumerate(hosts)}
    host_of_rank = np.full(max(places) + 1, NONE)
    for rank, place in places.items():
        if place is not None:
            host_of_rank[rank] = number[place.host]
    clocks = align(_meetings(ends, host_of_rank), len(hosts), reading_error_ns=READING_ERROR_NS)
    if len(clocks.unknown) == len(hosts) - 1:
        return Alignment(hosts, None, "no two hosts exchange anything in these steps in both ways")
    return Alignment(hosts, clocks)


def _meetings(ends: Mapping[str, Columns], host_of_rank: Columns) -> Meetings:
    """Members of a collective begin, and are through, where what they do waits for all; who sends
    begins, who receives is through."""
    _, meeting = np.unique(
        np.stack([ends["code"], ends["step"], ends["seq"], ends["check"]]),
        axis=1,
        return_inverse=True,
    )
    meeting = meeting.reshape(-1)
    known = host_of_rank[ends["rank"]] != NONE
    kind, through = ends["kind"], ends["through_ns"] != NONE
    begins = known & ((kind == COLLECTIVE) | (kind == SEND))
    finishes = known & through & ((kind == COLLECTIVE) | (kind == RECEIVE))
    return Meetings(
        begin_meeting_B=meeting[begins],
        begin_host_B=host_of_rank[ends["rank"][begins]],
        begin_ns_B=ends["t0_ns"][begins],
        end_meeting_E=meeting[finishes],
        end_host_E=host_of_rank[ends["rank"][finishes]],
        end_ns_E=ends["through_ns"][finishes],
    )
