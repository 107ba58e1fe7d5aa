"""The driver's loop: what came in, digest, decide, journal, actions; once a second the rest.

One thread decides. A batch is everything that came since the last one; its transitions are on the
disk before any of its actions is carried out. Silence is judged by this process's monotonic clock,
and when this process itself stood still nobody is blamed for it.

After its own death the next driver on the run folder rebuilds the job from the journal, raises the
epoch and answers agents that it does not know them; they join again with the ranks that they run,
which train on meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megascale.cluster.actions import FinishJob
from megascale.cluster.backends.base import Backend, Machine
from megascale.cluster.decide import Decision, begin, decide
from megascale.cluster.driver.actions import Hands
from megascale.cluster.driver.desk import Batch, Desk, JoinAsked
from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.first_rank import FirstRank
from megascale.cluster.driver.interpreter import answering
from megascale.cluster.driver.journal import Journal
from megascale.cluster.driver.lock import DriverLock, FencedDriverError
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.reading import Readings
from megascale.cluster.driver.readoption import Readoption
from megascale.cluster.driver.refusals import RefusedError
from megascale.cluster.driver.results import event_of
from megascale.cluster.driver.silences import silent_nodes
from megascale.cluster.driver.takeover import check_same_job
from megascale.cluster.driver.watch import Watch
from megascale.cluster.driver.words import Words
from megascale.cluster.job import OVER, JobState
from megascale.cluster.transitions import (
    DriverRestarted,
    Event,
    NodeGone,
    NodeJoined,
    Policy,
    StopRequested,
    Tick,
)
from megascale.errors import ConfigError, LaunchError

WAIT_S = 0.1  # for something to come
SECOND_S = 1.0
STOOD_STILL_S = 2.0  # between two turns of the loop
LEAVE_S = 5.0  # for agents to answer that they leave
_log = logging.getLogger(__name__)


class Driver:
    """Construction takes the run folder's lock, restores or begins the job, and opens the desk.

    `run` until the job ends. The HTTP server is `server.py`'s and stands on `desk`.
    Raises LaunchError where another driver holds the folder.
    """

    def __init__(
        self,
        policy: Policy,
        backend: Callable[[], Backend],
        program: Program,
        *,
        folder: Path,
    ) -> None:
        self.lock = DriverLock(folder / "lock")
        self.journal = Journal(folder / "journal.sqlite")
        self._began_s = time.monotonic()
        self._base_s = 0.0
        self.is_restart = False
        self._readoption: Readoption | None = None
        self._ended: JobState | None = None  # the job that the folder held before
        try:
            decision = self._restore(policy) or begin(policy)
            if not self.is_restart:
                self.journal.begin(decision, 0.0)
        except (ConfigError, LaunchError):
            self.abandon()
            raise
        self.job: JobState = decision.job
        self.desk = Desk(self.job)
        self._make_backend, self._program = backend, program
        self._start = decision
        readings = Readings()
        self._digest, self._watch = Digest(), Watch(program, readings)
        self._words = Words()
        is_recipe = program.argv is None
        self._first_rank = FirstRank(program.run_dir, readings, is_recipe=is_recipe)

    @property
    def job_s(self) -> float:
        """The job's clock: seconds since its start, over restarts of the driver."""
        return self._base_s + time.monotonic() - self._began_s

    def stop(self, reason: str = "") -> None:
        """Ask the job to save and end. From any thread, or a signal's handler; a second time it
        ends at once, and the machines are given back."""
        self.desk.post(StopRequested(reason))

    def abandon(self) -> None:
        """Let go of the folder without having run."""
        self.journal.close()
        self.lock.release()

    def run(self) -> int:
        """The exit code of the job. Raises FencedDriverError where another driver took over."""
        self._hands = Hands(self.desk, self._make_backend(), self._program)
        give_back = False
        try:
            self._begin()
            with answering() as look:
                finished = self._decide_until_the_end(self._hands, look)
            give_back = True
            self._say_goodbye()
            self._first_rank.end()
            (_log.info if finished.ok else _log.error)("%s", finished.report)
            return finished.exit_code
        finally:
            self._hands.close(give_back=give_back)
            self.journal.close()
            self.lock.release()

    def _decide_until_the_end(self, hands: Hands, look: Callable[[float], None]) -> FinishJob:
        next_s = last_s = time.monotonic()
        while (finished := hands.finished) is None:
            self.desk.wait(WAIT_S)
            now_s = time.monotonic()
            if now_s - last_s > STOOD_STILL_S:
                _log.warning("this driver stood still for %.1f s", now_s - last_s)
                self.desk.forgive(now_s)
            last_s = now_s
            if hands.fenced is not None:
                raise FencedDriverError(str(hands.fenced))
            self._take(self.desk.take())
            if now_s >= next_s:
                next_s = now_s + SECOND_S
                self.lock.check()
                self._each_second(now_s)
                look(now_s)
        return finished

    # ------------------------------------------------------------ beginnings

    def _restore(self, policy: Policy) -> Decision | None:
        restored = self.journal.restore()
        if restored is None or restored[0].over:
            if restored is not None:  # a new job in the folder: epochs go on
                return self._anew(policy, restored[0])
            return None
        job, job_s = restored
        check_same_job(job.policy, policy)
        down_s = max(0.0, time.time() - (self.journal.last_unix_s or time.time()))
        self._base_s = job_s + down_s
        self.is_restart = True
        self._readoption = Readoption(job, self._began_s)
        event = DriverRestarted(policy)
        decision = decide(job, event, self._base_s)
        self.journal.append([(event, decision, self._base_s)])
        return decision

    def _anew(self, policy: Policy, old: JobState) -> Decision:
        self._ended = old
        decision = begin(policy)
        job = replace(
            decision.job, epoch=old.epoch + 1, blocked=old.blocked, newest_step=old.newest_step
        )
        return replace(decision, job=job)

    def _begin(self) -> None:
        if self.is_restart:
            _log.info("this driver goes on with the job, epoch %d", self.job.epoch)
            known = [node for node in self.job.nodes.values() if node.state not in OVER]
            self._hands.adopt([Machine(node.name, node.host, node.switch) for node in known])
        updates = () if self._ended is None else self._ended.overrides
        dropped = [one for one in updates if one not in self._program.arguments]
        if dropped:
            _log.warning(
                "updates of the job before count no more: %s; give them again with POST /v1/update "
                "or as --set when it is started the next time",
                ", ".join(dropped),
            )
        self._words.say(None, self._start)
        for action in self._start.actions:
            self._hands.do(action, self.job)

    # ------------------------------------------------------------ turns

    def _take(self, batch: Batch) -> None:
        decided: list[tuple[Event, Decision, float]] = []
        joins: list[tuple[JoinAsked, NodeJoined]] = []
        for asked in batch.joins:
            joined = self._joined(asked)
            joins.append((asked, joined))
            self._decide(joined, decided)
        for heartbeat, at_s in batch.heartbeats:
            for event in self._digest.take(heartbeat, at_s, self.job):
                self._decide(event, decided)
        if batch.heartbeats:
            for event in self._digest.settle(self.job):
                self._decide(event, decided)
            for event in self._watch.hear(self._digest, self.job):
                self._decide(event, decided)
        for result, command in batch.results:
            self._watch.see_result(result, command)
            event_or_again = event_of(result, command, self.job)
            if event_or_again is None:
                continue
            if isinstance(event_or_again, tuple):
                self.desk.push(result.node, event_or_again[0], self.job.epoch)
                continue
            self._decide(event_or_again, decided)
        for event in batch.events:
            self._decide(event, decided)
        self._commit(decided, joins)

    def _each_second(self, now_s: float) -> None:
        decided: list[tuple[Event, Decision, float]] = []
        silences_s, readopting = self.desk.silences(now_s), self._readoption is not None
        for silent in silent_nodes(self.job, silences_s, readopting=readopting):
            self._decide(silent, decided)
        for event in self._watch.look(self._digest, self.job, now_s):
            self._decide(event, decided)
        self._decide(Tick(), decided)
        self._commit(decided)
        self._first_rank.look(now_s, self._digest.step)
        self._hands.watch()

    def _decide(self, event: Event, decided: list[tuple[Event, Decision, float]]) -> None:
        job_s = self.job_s
        decision = decide(self.job, event, job_s)
        if decision.job is not self.job or decision.actions:
            self.job = decision.job
            decided.append((event, decision, job_s))
        if self._readoption is not None:
            readopted = self._readoption.see(event, self.job, time.monotonic())
            if readopted is not None:
                self._readoption = None
                self._decide(readopted, decided)

    def _commit(
        self,
        decided: list[tuple[Event, Decision, float]],
        joins: Sequence[tuple[JoinAsked, NodeJoined]] = (),
    ) -> None:
        """To the disk, to the desk, then into the world."""
        if decided:
            self.lock.check()  # before the journal, which may be another driver's by now
            self.journal.append(decided)
            self.lock.check()
            self.desk.sync(self.job)
        for asked, joined in joins:  # before commands are queued for them
            self._answer(asked, joined)
        for event, decision, _ in decided:
            self._words.say(event, decision)
            for action in decision.actions:
                self._hands.do(action, decision.job)

    def _joined(self, asked: JoinAsked) -> NodeJoined:
        message, facts = asked.message, asked.message.facts
        machine = self._hands.machines.get(message.node)
        alive = [r for r in message.ranks if r.state in ("starting", "running")]
        own = [r.rank for r in alive if r.epoch == self.job.ranks_epoch]
        return NodeJoined(
            message.node,
            message.incarnation,
            machine.host if machine else facts.host,
            facts.ip,
            (machine.switch if machine else None) or facts.switch,
            message.epoch,
            tuple(own),
            stale=len(own) < len(alive),
        )

    def _answer(self, asked: JoinAsked, event: NodeJoined) -> None:
        """The HTTP side may have given up waiting; the agent then joins again."""
        if not asked.answer.set_running_or_notify_cancel():
            return
        try:
            asked.answer.set_result(self.desk.seat(event))
        except RefusedError as error:
            asked.answer.set_exception(error)

    def _say_goodbye(self) -> None:
        """Until every agent has heard that it is to leave, or is not there."""
        deadline_s = time.monotonic() + LEAVE_S
        leaving = {
            n.name for n in self.job.nodes.values() if n.state == "leaving" and n.incarnation
        }
        while self.desk.not_told(leaving) and time.monotonic() < deadline_s:
            self.desk.wait(WAIT_S)
            batch = self.desk.take()
            leaving -= {event.node for event in batch.events if isinstance(event, NodeGone)}
            for asked in batch.joins:
                asked.answer.set_exception(RefusedError(403, "the job is over"))
            self._hands.watch()
