"""When ranks launched their collectives, from the line files that they leave in the run folder.

Launches are compared on one clock, so only those of groups whose ranks are on one node: its
processes share CLOCK_MONOTONIC, and no other two clocks agree to the millisecond that is asked
about. Without a device the host computes, and launches late what it computed slowly: that is a
straggler, so such spans say nothing here. The spans are of every `telemetry.span_interval`-th step.
A look reads the end of at most MOST_RANKS files; the next look goes on with other groups, so that a
large job costs the driver no more than a small one. Of a larger group, parts are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from megascale.cluster.driver.program import Groups
from megascale.cluster.driver.reading import Readings
from megascale.errors import DataError
from megascale.events import Header, Span, parse_line
from megascale.telemetry.diagnose.late import Launch

MOST_RANKS = 16
TAIL_BYTES = 256 << 10
Instances = dict[str, dict[int, str]]  # of a group's name and a rank: which group it is in


class Launches:
    """`looked_at`: the step of the last look, which `ask` begins and `take` has the end of."""

    def __init__(self, folder: Path, readings: Readings) -> None:
        self._folder, self._readings = folder, readings
        self._epoch: int | None = None
        self.looked_at, self._next = 0, 0

    def begin(self, epoch: int | None) -> None:
        self._epoch, self.looked_at = epoch, 0

    def ask(self, step: int, groups: Groups, nodes: Sequence[Sequence[int]]) -> None:
        """Have the launches of some groups read, in the newest steps whose spans there are."""
        self.looked_at = step
        node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        instances: Instances = {}
        peers: list[tuple[int, ...]] = []
        for name, of in groups.items():
            for number, members in enumerate(of):
                if len(members) > 1 and len({node_of.get(rank) for rank in members}) == 1:
                    parts = -(-len(members) // MOST_RANKS)
                    peers += [tuple(members[part::parts]) for part in range(parts)]
                    instances.setdefault(name, {}).update(
                        dict.fromkeys(members, f"{name} {number}")
                    )
        ranks: set[int] = set()
        for offset in range(len(peers)):
            members = peers[(self._next + offset) % len(peers)]
            if len(ranks | {*members}) > MOST_RANKS:
                self._next = (self._next + offset) % len(peers)
                break
            ranks |= {*members}
        self._readings.ask("telemetry", self._epoch, partial(self._read, sorted(ranks), instances))

    def take(self) -> list[Launch] | None:
        """What the look found, once it has."""
        found: list[Launch] | None = self._readings.take("telemetry", self._epoch)
        return found

    def _read(self, ranks: Sequence[int], instances: Instances) -> list[Launch]:
        """Beside the thread that decides."""
        found = []
        for rank in ranks:
            for span in self._spans(rank):
                instance = instances.get(span.group or "", {}).get(rank)
                if instance is not None and span.seq is not None and span.issued_ns is not None:
                    found.append(Launch(rank, instance, span.seq, span.issued_ns))
        return found

    def _spans(self, rank: int) -> Iterator[Span]:
        """Of the end of the rank's file, behind its last start."""
        try:
            with (self._folder / f"rank_{rank:05d}.jsonl").open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - TAIL_BYTES))
                lines = file.read().split(b"\n")[1:-1]
        except OSError:
            return
        found: list[Span] = []
        for line in lines:
            if b'"group"' not in line and b'"header"' not in line[:32]:
                continue
            try:
                event = parse_line(line)
            except DataError:
                continue
            if isinstance(event, Header):
                found = []
            elif isinstance(event, Span):
                found.append(event)
        yield from found
