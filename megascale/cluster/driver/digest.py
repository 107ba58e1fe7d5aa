"""Heartbeats to events: what changed, told once. No clock of its own.

Holds the newest report of each rank, which the detectors look at once a second. What ranks of an
epoch before still say is passed over.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from megascale.cluster.driver.hardware import Hardware
from megascale.cluster.driver.progress import SAVING, RankAge
from megascale.cluster.job import OVER, JobState
from megascale.cluster.messages import Heartbeat, NicReport, Noticed, RankReport
from megascale.cluster.transitions import (
    Event,
    NodeHeard,
    RankExited,
    RanksStarted,
    StepReached,
)
from megascale.telemetry.diagnose.places import STOPPED
from megascale.telemetry.diagnose.straggler import compute_ns

KEPT_STEPS = 128  # of each rank, for the detectors


@dataclass
class RankSeen:
    """The newest word of a rank, and when it came, by the driver's clock.

    computed_ns  (step, time that it spent computing) of its newest steps
    """

    report: RankReport
    at_s: float
    finished: int | None = None
    computed_ns: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def age_s(self, now_s: float) -> float:
        progress = self.report.progress
        since_s = self.report.uptime_s if progress is None else progress.age_s
        return since_s + max(0.0, now_s - self.at_s)


class Digest:
    """One a driver. `ranks` are those of `epoch`; `noticed` is for the detectors to take."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.ranks: dict[int, RankSeen] = {}
        self.noticed: list[tuple[int, Noticed]] = []
        self.heard_s = 0.0  # the newest heartbeat
        self._nics: dict[str, Sequence[NicReport]] = {}
        self._hardware = Hardware()
        self._told_exits: set[int] = set()
        self._started = False
        self._step: int | None = None
        self._behind: set[int] = set()  # ranks that have finished no step after `_step`
        self._saved_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=50)
        self._timed_step = 0

    def take(self, heartbeat: Heartbeat, at_s: float, job: JobState) -> Iterator[Event]:
        """The events of one heartbeat. Steps and starts come with `settle`."""
        self.heard_s = max(self.heard_s, at_s)
        if job.ranks_epoch != self.epoch:
            self._begin(job.ranks_epoch)
            here = {node.name for node in job.nodes.values() if node.state not in OVER}
            self._hardware.forget_all_but(here)
        node = job.nodes.get(heartbeat.node)
        if node is not None and node.state == "suspect":
            yield NodeHeard(heartbeat.node)
        yield from self._hardware.look(heartbeat, at_s)
        if heartbeat.nics:
            self._see_nics(heartbeat)
        reports = [r for r in heartbeat.ranks if r.epoch == self.epoch]
        first = heartbeat.first_failed
        for report in sorted(reports, key=lambda one: (one.rank != first, one.rank)):
            self._see(report, at_s)
            if report.state == "exited" and report.rank not in self._told_exits:
                self._told_exits.add(report.rank)
                yield self._exit(report)

    def settle(self, job: JobState) -> Iterator[Event]:
        """After a batch: did all ranks start, and which step did all of them finish?"""
        if job.ranks_epoch != self.epoch or not job.world_size:
            return
        if len(self.ranks) < job.world_size:
            return
        if not self._started and all(_is_in_a_step(seen.report) for seen in self.ranks.values()):
            self._started = True
            assert self.epoch is not None, job.phase
            yield RanksStarted(self.epoch)
        if self._behind:  # a batch comes some tens of times a second, and ranks are thousands
            return
        assert self.epoch is not None, job.phase
        self._step = step = min(seen.finished or 0 for seen in self.ranks.values())
        self._behind = {r for r, seen in self.ranks.items() if (seen.finished or 0) <= step}
        saved_s, self._saved_s = self._saved_s, 0.0
        yield StepReached(self.epoch, step, saved_s)

    def ages(self, least_s: float) -> list[RankAge]:
        """Of the ranks that run and are saving or have said nothing for `least_s`, as their last
        heartbeat told: what a silent node's ranks do is not known, and its silence is judged
        apart."""
        found = []
        for rank, seen in self.ranks.items():
            report = seen.report
            progress = report.progress
            if progress is not None and progress.age_s <= least_s and progress.phase not in SAVING:
                continue
            if report.state not in ("starting", "running"):
                continue
            found.append(
                RankAge(
                    rank=rank,
                    phase=report.progress.phase if report.progress else None,
                    step=report.progress.step if report.progress else None,
                    age_s=report.progress.age_s if report.progress else report.uptime_s,
                    uptime_s=report.uptime_s,
                    saved=report.progress.saved if report.progress else None,
                    has_stepped=seen.finished is not None and self._step is not None,
                    is_stopped=report.os_state in STOPPED,
                )
            )
        return found

    @property
    def median_step_s(self) -> float | None:
        return median(self._durations_s) if self._durations_s else None

    @property
    def step(self) -> int | None:
        """Newest step that all ranks of the epoch finished."""
        return self._step

    def take_nics(self) -> dict[str, Sequence[NicReport]]:
        """The newest report of each node that sent one since the last call."""
        nics, self._nics = self._nics, {}
        return nics

    def take_noticed(self) -> list[tuple[int, Noticed]]:
        noticed, self.noticed = self.noticed, []
        return noticed

    # ------------------------------------------------------------ inside

    def _begin(self, epoch: int | None) -> None:
        self.epoch, self.ranks, self._told_exits = epoch, {}, set()
        self._started, self._step, self._saved_s = False, None, 0.0
        self._behind = set()
        self._durations_s.clear()
        self._timed_step = 0
        self.noticed = []

    def _see(self, report: RankReport, at_s: float) -> None:
        seen = self.ranks.get(report.rank)
        if seen is None:
            seen = self.ranks[report.rank] = RankSeen(report, at_s)
            self._behind.add(report.rank)
        progress = report.progress
        if progress is not None and progress.phase == "checkpoint" and report.rank == 0:
            self._saved_s += min(progress.age_s, max(0.0, at_s - seen.at_s))
        seen.report, seen.at_s = report, at_s
        newest = seen.computed_ns[-1][0] if seen.computed_ns else 0
        for sums in report.steps:  # a heartbeat whose answer was lost comes with them again
            if sums.step > newest:
                seen.computed_ns.append((sums.step, compute_ns(sums.phases)))
                if sums.step > self._timed_step:
                    self._timed_step = sums.step
                    self._durations_s.append(sums.total_ns / 1e9)
        self.noticed.extend((report.rank, noticed) for noticed in report.noticed)
        finished = _finished(report)
        if finished is not None:
            seen.finished = max(finished, seen.finished or 0)
            if seen.finished > (self._step or 0):
                self._behind.discard(report.rank)

    def _see_nics(self, heartbeat: Heartbeat) -> None:
        """Settings come with a change and once a minute: they stay until they are taken."""
        told = {nic.name: nic.settings for nic in self._nics.get(heartbeat.node, ())}
        self._nics[heartbeat.node] = [
            nic
            if nic.settings or not told.get(nic.name)
            else nic.model_copy(update={"settings": told[nic.name]})
            for nic in heartbeat.nics
        ]

    def _exit(self, report: RankReport) -> RankExited:
        failure, code = report.failure, report.exit_code
        assert self.epoch is not None, report
        if code is None:
            code = 1 if failure is not None else 0
        step = report.progress.step if report.progress else None
        return RankExited(
            report.rank,
            code,
            self.epoch,
            kind=failure.kind if failure else ("signal" if code < 0 else "exit"),
            message=failure.message if failure else "",
            signal=(failure.signal if failure else None) or _signal_name(code),
            step=step,
        )


def _is_in_a_step(report: RankReport) -> bool:
    progress = report.progress
    return progress is not None and progress.phase != "init" and progress.step >= 1


def _finished(report: RankReport) -> int | None:
    """The newest step that the rank finished, as its sums or its page tell."""
    from_sums = max((sums.step for sums in report.steps), default=None)
    progress = report.progress
    if progress is None or progress.step < 1:
        return from_sums
    from_page = progress.step if progress.phase in ("done", *SAVING) else progress.step - 1
    if from_sums is None:
        return from_page if from_page > 0 else None
    return max(from_sums, from_page)


def _signal_name(code: int) -> str | None:
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
