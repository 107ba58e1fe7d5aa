"""One job and its faults, one after another, from its first step to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megascale.cluster.chaos.faults import KINDS
from megascale.cluster.chaos.inject import Hit
from megascale.cluster.chaos.judge import Line, Story, tell
from megascale.cluster.chaos.live import LiveJob
from megascale.cluster.chaos.observe import Journal
from megascale.cluster.chaos.schedule import JobPlan, Planned, Schedule
from megascale.cluster.chaos.verify import Check, lost_steps, read_metrics
from megascale.cluster.driver.journal import is_unfinished
from megascale.errors import LaunchError, MegascaleError

LOOK_S = 0.2
FIRST_STEP_S = 300.0
Say = Callable[[str], None]


@dataclass
class Done:
    """A job that is over."""

    plan: JobPlan
    folder: Path
    lines: list[Line] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    ettr: float | None = None
    newest_step: int = 0
    ports: set[tuple[str, int]] = field(default_factory=set)


class Course:
    """The faults of one job, in turn."""

    def __init__(self, schedule: Schedule, live: LiveJob, say: Say) -> None:
        self.schedule, self.live, self.say = schedule, live, say
        self.journal = Journal(live.spec.folder / "driver" / "journal.sqlite")
        self.hits: list[tuple[Planned, Hit | None, Line]] = []

    def run(self, faults: list[Planned], done: Done) -> None:
        """All of `faults`; what came of each is in `done`, whatever came between."""
        why = "the job was over before it"
        try:
            self._have(faults)
        except MegascaleError as error:
            why = f"chaos could not go on: {error}"
            self.say(why)
        tried = {fault.number for fault, _, _ in self.hits}
        self.hits += [
            (fault, None, Line(fault.number, fault.kind, "", 0.0, wrong=why))
            for fault in faults
            if fault.number not in tried
        ]
        self.live.note_ports()
        self.live.end()
        self.journal.read()
        done.lines += self._lines()
        job = self.journal.job
        done.ettr = job.ledger.ettr if job else None
        done.newest_step = max((row["step"] for row in read_metrics(done.folder)), default=0)
        done.ports = self.live.ports

    def _have(self, faults: list[Planned]) -> None:
        self.live.start_driver()
        self._await_step(self.schedule.job.first_step, FIRST_STEP_S)
        began_s = time.monotonic()
        for fault in faults:
            if self._job_is_over:
                return
            self._await_turn(fault, began_s)
            self._do(fault, began_s)
        if self.schedule.job.duration_s is not None:
            self._sleep_until(began_s + self.schedule.job.duration_s)
        elif not self._job_is_over:
            with suppress(LaunchError):
                self._await_step(self._newest + self.schedule.job.gap_steps, 60.0)

    # ------------------------------------------------------------ waiting

    @property
    def _newest(self) -> int:
        self.journal.read()
        return self.journal.job.newest_step if self.journal.job else 0

    @property
    def _job_is_over(self) -> bool:
        self.journal.read()
        return self.journal.job is not None and self.journal.job.over

    def _await_step(self, step: int, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while self._newest < step:
            if time.monotonic() > deadline_s or self.live.driver.poll() is not None:
                log = self.live.rig.folder / "driver.log"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise LaunchError(f"step {step} was not reached in {within_s:g} s; {log}:\n{tail}")
            time.sleep(LOOK_S)

    def _await_turn(self, fault: Planned, began_s: float) -> None:
        job = self.schedule.job
        with suppress(LaunchError):  # a job that does not step any more: the fault's line says it
            self._await_step(fault.at_step or self._newest + job.gap_steps, fault.within_s)
        if fault.at_s is not None:
            self._sleep_until(began_s + fault.at_s)

    def _sleep_until(self, until_s: float) -> None:
        while time.monotonic() < until_s and not self._job_is_over:
            time.sleep(LOOK_S)

    # ------------------------------------------------------------ one fault

    def _do(self, fault: Planned, began_s: float) -> None:
        kind, live = KINDS[fault.kind], self.live
        live.note_ports()
        aim = fault.target
        whom = {"rank": f"rank {aim.rank}", "node": f"node {aim.node}", "job": ""}[kind.aims]
        line = Line(fault.number, fault.kind, whom, 0.0)
        num_rows = len(read_metrics(live.spec.folder))
        try:
            hit = kind.inject(live, aim)
        except MegascaleError as error:
            line.wrong = f"it could not be done: {error}"
            self.hits.append((fault, None, line))
            self.say(f"fault {fault.number} {fault.kind}: {line.wrong}")
            return
        if kind.aims == "node" or (kind.names == "node" and hit.node is not None):
            line.target = hit.node or line.target
        deadline_s = time.monotonic() + fault.within_s
        while time.monotonic() < deadline_s and not self._is_over(fault, hit):
            time.sleep(LOOK_S)
        line.injected_s = round(hit.at_s - began_s, 3)
        line.lost_steps = lost_steps(read_metrics(live.spec.folder)[max(0, num_rows - 1) :])
        self.hits.append((fault, hit, line))
        waited_s = time.monotonic() - hit.at_s
        self.say(f"fault {fault.number} {fault.kind} {line.target}: over after {waited_s:.1f} s")

    def _is_over(self, fault: Planned, hit: Hit) -> bool:
        self._date(hit)
        if hit.order is not None and not self.live.happened(hit.order):
            return False
        self.journal.read()
        story = Story.since(KINDS[fault.kind], hit, self.journal.turns)
        if KINDS[fault.kind].outcome == "stop":
            return self.live.driver.poll() is not None and not is_unfinished(self.journal.path)
        return story.is_over(time.monotonic())

    def _date(self, hit: Hit) -> None:
        """The moment of an order is when a rank obeyed it first."""
        happened = self.live.happened(hit.order) if hit.order is not None else []
        if happened:
            hit.at_s = happened[0]["monotonic_ns"] / 1e9
            hit.said |= {"step": happened[0]["step"], "times": len(happened)}

    def _lines(self) -> list[Line]:
        lines = []
        moments = [hit.at_s for _, hit, _ in self.hits if hit is not None]
        for fault, hit, line in self.hits:
            if hit is not None:
                until_s = min((at_s for at_s in moments if at_s > hit.at_s), default=float("inf"))
                story = Story.since(KINDS[fault.kind], hit, self.journal.turns, until_s)
                tell(line, story)
                line.step = hit.said.get("step")
            lines.append(line)
        return lines
