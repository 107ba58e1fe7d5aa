"""Who is asked what was seen: a method a detector of `telemetry/diagnose/`, once a second at most.

Detectors are pure functions over tables; here the heartbeats become those tables. What they find is
an event for `decide`, which acts on what is certain and has a rung in `ladder.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.launches import Launches
from megascale.cluster.driver.losses import Losses
from megascale.cluster.driver.ports import Ports
from megascale.cluster.driver.program import Groups, Program
from megascale.cluster.driver.reading import Readings
from megascale.cluster.driver.replicas import Replicas
from megascale.cluster.job import JobState
from megascale.cluster.messages import Noticed, RankReport
from megascale.cluster.transitions import Event, Found, HangSuspected
from megascale.config.cluster import ClusterConfig
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.hang import RankView, localise
from megascale.telemetry.diagnose.late import late_launchers
from megascale.telemetry.diagnose.numerics import loss_spike, nonfinite
from megascale.telemetry.diagnose.straggler import Window, stragglers, window

KEPT_WINDOWS = 10
_LASTING = ("slow_rank", "late_launch")  # found in each window that it lasts for, and only told


def localise_hang(
    digest: Digest,
    groups: Groups,
    stacks: Mapping[int, str],
    suspects: tuple[int, ...],
    now_s: float,
) -> Finding:
    """Who holds the others up; the suspects themselves where nothing tells them apart. Ranks that
    ended well hold up nobody: the others are compared without them."""
    over = {rank for rank, seen in digest.ranks.items() if _ended_well(seen.report)}
    if len(over) == len(digest.ranks):
        over = set()
    groups = {
        name: [tuple(rank for rank in members if rank not in over) for members in instances]
        for name, instances in groups.items()
    }
    views = {}
    for rank, seen in digest.ranks.items():
        if rank in over:
            continue
        report, progress = seen.report, seen.report.progress
        view = RankView(
            epoch=report.epoch,
            age_s=seen.age_s(now_s),
            os_state=report.os_state,
            alive=report.state != "exited",
        )
        if progress is not None:
            view = replace(
                view,
                epoch=progress.epoch,
                step=progress.step,
                phase=progress.phase,
                micro_batch=progress.micro_batch,
                chunk=progress.chunk,
                group_id=progress.group_id,
                seq=progress.seq,
                completed_step=progress.completed_step,
            )
        views[rank] = view
    finding = localise(views, groups, dict(stacks))
    return finding if finding.ranks else replace(finding, ranks=suspects, certain=False)


def _ended_well(report: RankReport) -> bool:
    """With code 0 after its last step; one that left the others in the middle did not."""
    progress = report.progress
    is_done = progress is not None and progress.phase == "done"
    return report.state == "exited" and report.exit_code == 0 and is_done


class Detectors:
    """Remembers, within an epoch, what was handed over and what was said already."""

    def __init__(self, program: Program, readings: Readings) -> None:
        self._program = program
        self._ports = Ports()
        self._launches = Launches(program.run_dir / "telemetry", readings)
        self._losses = Losses(program.run_dir / "metrics.jsonl", readings)
        self._begin(None, None)

    def _begin(self, epoch: int | None, job: JobState | None) -> None:
        self._epoch = epoch
        self._windows: deque[Window] = deque(maxlen=KEPT_WINDOWS)
        self._next_step: int | None = None
        self._window_ends_s: deque[float] = deque(maxlen=KEPT_WINDOWS)
        self._slow_since_s: dict[int, float] = {}
        self._said: set[tuple[str, int | None, tuple[int, ...]]] = set()
        self._replicas = Replicas()
        self._losses.begin(epoch)
        self._ports.begin(job)
        self._launches.begin(epoch)

    def look(self, digest: Digest, job: JobState) -> Iterator[Event]:
        """What is new. A finding of one kind, step and ranks is said once; one that lasts, once
        an epoch."""
        yield from self.hear(digest, job)
        groups = self._program.groups(job.world_size)
        found = [
            *self._stragglers(digest, groups, job),
            *self._late(digest, groups, job),
            *self._spikes(job),
            *self._ports.look(digest, job),
        ]
        still = [one for one in found if one.kind == "traffic_stopped" and not one.ranks]
        yield from self._new([one for one in found if one not in still])
        for one in still[:1]:
            seconds = min(one.evidence["quiet_s"].values())
            reason = f"no port has moved a byte for {seconds:.1f} s"
            yield HangSuspected(tuple(range(job.world_size)), reason, digest.step)

    def hear(self, digest: Digest, job: JobState) -> Iterator[Event]:
        """Of what the trainers told of themselves. Also while they stop: some end right behind it,
        and what they told says who is to blame for that."""
        if digest.epoch != self._epoch:
            self._begin(digest.epoch, job)
        groups = self._program.groups(job.world_size)
        yield from self._new([*self._noticed(digest.take_noticed(), groups, job)])

    def _new(self, findings: list[Finding]) -> Iterator[Event]:
        for finding in findings:
            step = None if finding.kind in _LASTING else finding.step
            what = (finding.kind, step, finding.ranks)
            if what not in self._said:
                self._said.add(what)
                yield Found(finding)

    # ------------------------------------------------------------ a method a detector

    def _noticed(
        self, noticed: list[tuple[int, Noticed]], groups: Groups, job: JobState
    ) -> Iterator[Finding]:
        """The trainers' own incidents. One that is not finite is theirs to skip or to stop for:
        here it is told and no more (`nonfinite_step` has no rung)."""
        bad: dict[int, list[tuple[int, Mapping[str, object]]]] = {}
        for rank, one in noticed:
            if one.name == "nonfinite" and one.step is not None:
                bad.setdefault(rank, []).append((one.step, one.detail))
            if one.name == "replicas_differ":
                self._replicas.add(rank, one)
        found = nonfinite(bad, job.world_size)
        if found is not None:
            yield replace(found, kind="nonfinite_step", certain=False)
        yield from self._replicas.look(groups)

    def _stragglers(self, digest: Digest, groups: Groups, job: JobState) -> Iterator[Finding]:
        """A window whenever all ranks have told of so many steps more."""
        cluster, world_size = job.policy.cluster, job.world_size
        if digest.step is None or len(digest.ranks) < world_size:
            return
        if self._next_step is None:
            self._next_step = digest.step + 1  # the first steps are slow for other reasons
            self._window_ends_s.append(digest.heard_s)
        last = self._next_step + cluster.straggler_window - 1
        if digest.step < last:
            return
        steps = range(self._next_step, last + 1)
        self._next_step = last + 1
        times_SR = np.full((len(steps), world_size), np.nan)
        for rank in range(world_size):
            for step, computed_ns in digest.ranks[rank].computed_ns:
                if step in steps:
                    times_SR[step - steps.start, rank] = computed_ns
        stage_R = _stages(groups, world_size)
        self._windows.append(window(times_SR, stage_R, last))
        self._window_ends_s.append(digest.heard_s)
        if len(self._windows) < cluster.straggler_windows:
            return
        found = stragglers(list(self._windows), stage_R, window_steps=cluster.straggler_window)
        if found is None:
            self._slow_since_s = {}
            return
        share = found.evidence["share"]
        slow = tuple(r for r in found.ranks if share[str(r)] >= cluster.straggler_share)
        long = self._slow_for_long(slow, cluster)
        if long:
            yield replace(found, ranks=long)
        else:  # told and no more: it has no rung
            yield replace(found, kind="slow_rank", certain=False)

    def _slow_for_long(self, slow: tuple[int, ...], cluster: ClusterConfig) -> tuple[int, ...]:
        """Those of `slow`, by the newest windows, that have been for `straggler_least_s`. Windows
        count steps, and a host that is busy elsewhere for seconds slows hundreds of short ones:
        seen on an H200 whose steps of 12 ms took 5 % longer for 6 s at a time."""
        ends = list(self._window_ends_s)
        begun_s = ends[-min(len(ends), cluster.straggler_windows + 1)]
        self._slow_since_s = {rank: self._slow_since_s.get(rank, begun_s) for rank in slow}
        since = ends[-1] - cluster.straggler_least_s
        return tuple(rank for rank in slow if self._slow_since_s[rank] <= since)

    def _late(self, digest: Digest, groups: Groups, job: JobState) -> Iterator[Finding]:
        """Once a window: told and no more, it has no rung."""
        window_steps = job.policy.cluster.straggler_window
        if digest.step is None:
            return
        if digest.step >= self._launches.looked_at + window_steps:
            nodes = [tuple(job.ranks_of(job.nodes[name])) for name in job.holders.values()]
            self._launches.ask(digest.step, groups, nodes)
        launches = self._launches.take()
        found = late_launchers(launches, self._launches.looked_at) if launches else None
        if found is not None:
            yield replace(found, certain=False)

    def _spikes(self, job: JobState) -> Iterator[Finding]:
        """A jump of the loss: an alert, or a fault where it is `cluster.loss_spike` or more."""
        least = job.policy.cluster.loss_spike
        for step, losses in self._losses.new():
            if not least:
                continue
            found = loss_spike(losses, step)
            if found is not None:
                above = losses[-1] - float(found.evidence["median"])
                yield replace(found, certain=found.certain and not above < least)


def _stages(groups: Groups, world_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Pipeline stage of each rank; one stage where there is no pipeline."""
    stage_R = np.zeros(world_size, dtype=np.int64)
    for members in groups.get("pipeline", ()):
        for stage, rank in enumerate(members):
            stage_R[rank] = stage
    return stage_R
