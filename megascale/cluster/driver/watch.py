"""Once a second over all ranks: is one too long in its phase, and what do the detectors say?

A hang goes in two steps. The suspicion is an event; `decide` then has all stacks dumped. The pages
alone may name the rank for certain at once; else the dumps are waited for, at most `DUMPS_S`, and
`localise` is asked again with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megascale.cluster.driver import detectors
from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.progress import find_stall, least_deadline_s
from megascale.cluster.driver.reading import Readings
from megascale.cluster.job import JobState
from megascale.cluster.messages import Command, Result
from megascale.cluster.transitions import Event, Found, HangSuspected

DUMPS_S = 2.5  # a node's dump takes 2 s at most (`agent/dump.py`)


@dataclass
class _Look:
    """A hang that is looked into: since when, and which nodes' dumps have come."""

    since_s: float
    epoch: int
    dumped: set[str] = field(default_factory=set)
    stacks: dict[int, str] = field(default_factory=dict)


class Watch:
    """One a driver."""

    def __init__(self, program: Program, readings: Readings) -> None:
        self._program = program
        self._look: _Look | None = None
        self._detectors = detectors.Detectors(program, readings)

    def look(self, digest: Digest, job: JobState, now_s: float) -> Iterator[Event]:
        if job.phase not in ("starting", "training") or digest.epoch != job.ranks_epoch:
            self._look = None
            return
        if job.suspicion is not None:
            yield from self._localise(digest, job, now_s)
            return
        self._look = None
        cluster = job.policy.cluster
        ages = digest.ages(least_deadline_s(cluster))
        stall = find_stall(ages, cluster, digest.median_step_s)
        if stall is not None:
            self._look = _Look(now_s, job.epoch)  # a dump may be here before the next look
            yield HangSuspected(stall.ranks, stall.reason, stall.step)
            return
        if job.phase == "training":
            yield from self._detectors.look(digest, job)

    def hear(self, digest: Digest, job: JobState) -> Iterator[Event]:
        """Of heartbeats that have just come, what ranks told of themselves."""
        if digest.noticed and digest.epoch == job.ranks_epoch:
            yield from self._detectors.hear(digest, job)

    def see_result(self, result: Result, command: Command) -> None:
        """A dump that was asked for."""
        if self._look is None or command.order.kind != "dump":
            return
        self._look.dumped.add(result.node)
        stacks = result.detail.get("stacks")
        if isinstance(stacks, dict):
            for rank, text in stacks.items():
                if str(rank).isdigit():
                    self._look.stacks[int(rank)] = str(text)

    def _localise(self, digest: Digest, job: JobState, now_s: float) -> Iterator[Event]:
        assert job.suspicion is not None, job.phase
        if self._look is None or self._look.epoch != job.epoch:
            self._look = _Look(now_s, job.epoch)
        look, suspects = self._look, job.suspicion.ranks
        groups = self._program.groups(job.world_size)
        finding = detectors.localise_hang(digest, groups, look.stacks, suspects, now_s)
        all_dumped = look.dumped >= set(job.holders.values())
        if finding.certain or all_dumped or now_s - look.since_s >= DUMPS_S:
            yield Found(finding)
