"""What agents said and what they are to be told, between the HTTP thread and the one that decides.

The HTTP thread only fills in and reads; the deciding thread takes a batch at a time, so a slow disk
under the journal delays no heartbeat. A seat is the driver's view of one node. All times are the
driver's own monotonic clock at receipt: what agents say about time decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from megascale.cluster.driver.refusals import Refusals, RefusedError
from megascale.cluster.job import OVER, JobState
from megascale.cluster.messages import Command, Heard, Heartbeat, Join, Joined, Order, Result
from megascale.cluster.transitions import Event, NodeJoined

MOST_COMMANDS = 64
_EPOCH_SHIFT = 20  # sequence numbers of a later epoch are larger, also those of a later driver
_FAR = 1 << 20  # epochs that no number of restarts explains


@dataclass
class Seat:
    """heard_s: last heartbeat. ranks: those that this node may report, of the present epoch.

    commands  not known to be with the agent; sent: without a result, of both the newest
    """

    node: str
    incarnation: str = ""
    is_joined: bool = False
    heard_s: float = 0.0
    ranks: range = range(0)
    node_rank: int | None = None
    leave: bool = False
    is_told: bool = False  # that it is to leave
    commands: deque[Command] = field(default_factory=lambda: deque(maxlen=MOST_COMMANDS))
    sent: dict[int, Command] = field(default_factory=dict)
    superseded: set[str] = field(default_factory=set)
    wake: Callable[[], None] | None = None  # ends the long poll that waits


@dataclass
class JoinAsked:
    """To be decided; `answer` gets Joined, or RefusedError."""

    message: Join
    answer: Future[Joined]


@dataclass
class Batch:
    heartbeats: list[tuple[Heartbeat, float]] = field(default_factory=list)
    joins: list[JoinAsked] = field(default_factory=list)
    results: list[tuple[Result, Command]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Desk:
    """One a driver."""

    def __init__(self, job: JobState, clock: Callable[[], float] = time.monotonic) -> None:
        self.job, self.clock = job, clock
        self.refusals = Refusals()
        self.is_closed = False
        self._lock = threading.Lock()
        self._something = threading.Event()
        self._seats: dict[str, Seat] = {}
        self._batch = Batch()
        self._count = 0
        self.sync(job)

    # ------------------------------------------------------------ HTTP thread

    def heartbeat(self, message: Heartbeat) -> Heard:
        """Cheap: a look-up and an append. Raises RefusedError for ranks that are another's."""
        now_s = self.clock()
        with self._lock:
            seat = self._seats.get(message.node)
            if seat is None or seat.incarnation != message.incarnation or not seat.is_joined:
                gone = seat is not None and message.incarnation in seat.superseded
                known = gone or (seat is not None and seat.leave)
                self.refusals.note("unknown incarnation", message.node)
                return Heard(epoch=self.job.epoch, known=known, leave=known)
            if message.epoch > self.job.epoch:
                raise self.refusals.refuse(
                    409,
                    f"{message.node} knows epoch {message.epoch}, this driver is of epoch "
                    f"{self.job.epoch}: another driver has the job",
                )
            if seat.leave:
                seat.is_told = True
                return Heard(epoch=self.job.epoch, leave=True)
            self._check_claims(seat, message.node, [(r.rank, r.epoch) for r in message.ranks])
            seat.heard_s = now_s
            self._batch.heartbeats.append((message, now_s))
        if any(r.state in ("exited", "unkillable") or r.failure for r in message.ranks):
            self._something.set()
        return Heard(epoch=self.job.epoch)

    def join(self, message: Join) -> Future[Joined]:
        """Raises RefusedError for an agent that was replaced, and for ranks that are another's."""
        with self._lock:
            seat = self._seats.get(message.node)
            if seat is not None and message.incarnation in seat.superseded:
                raise self.refusals.refuse(
                    403, f"{message.node}: a newer agent has joined under this name; end this one"
                )
            if seat is not None and seat.leave and seat.incarnation == message.incarnation:
                raise self.refusals.refuse(403, f"{message.node} was evicted or given up; end it")
            if message.epoch > self.job.epoch + _FAR:
                raise self.refusals.refuse(
                    409, f"{message.node} knows epoch {message.epoch}, the job {self.job.epoch}"
                )
            claims = [(r.rank, r.epoch) for r in message.ranks if r.state != "exited"]
            self._check_claims(seat, message.node, claims)
            asked = JoinAsked(message, Future())
            self._batch.joins.append(asked)
        self._something.set()
        return asked.answer

    def _check_claims(self, seat: Seat | None, node: str, claims: list[tuple[int, int]]) -> None:
        own = seat.ranks if seat is not None else range(0)
        present = self.job.ranks_epoch
        wrong = [rank for rank, epoch in claims if epoch == present and rank not in own]
        if wrong:
            raise self.refusals.refuse(
                409,
                f"{node} claims rank {wrong[0]} of epoch {present}, which is not its own: it has "
                f"{f'ranks {own.start} to {own.stop - 1}' if own else 'none'}",
            )

    def commands_after(self, node: str, incarnation: str, after: int) -> list[Command]:
        """What is to be obeyed next; what came up to `after` is known to be there."""
        with self._lock:
            seat = self._seats.get(node)
            if seat is None or seat.incarnation != incarnation or not seat.is_joined:
                raise self.refusals.refuse(404, f"{node} has not joined as {incarnation}; join")
            while seat.commands and seat.commands[0].sequence <= after:
                seat.commands.popleft()
            return [self._stamped(command) for command in seat.commands]

    def _stamped(self, command: Command) -> Command:
        """What names no ranks is good in any epoch, and an agent refuses those that are over."""
        if command.order.kind in ("start", "stop") or command.epoch == self.job.epoch:
            return command
        return command.model_copy(update={"epoch": self.job.epoch})

    def on_command(self, node: str, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, once there is a command; the poll before ends."""
        with self._lock:
            seat = self._seats.get(node)
            before = None if seat is None else seat.wake
            if seat is not None:
                seat.wake = wake
        if before is not None:
            before()

    def result(self, message: Result) -> Heard:
        with self._lock:
            seat = self._seats.get(message.node)
            if seat is None or seat.incarnation != message.incarnation:
                self.refusals.note("result of an unknown incarnation", message.node)
                return Heard(epoch=self.job.epoch, known=False)
            command = seat.sent.pop(message.sequence, None)
            if command is not None:
                self._batch.results.append((message, command))
                seat.is_told |= command.order.kind == "leave"
            elif not seat.leave:
                self.refusals.note("result of no command of this driver", message.node)
        self._something.set()
        return Heard(epoch=self.job.epoch, leave=seat.leave)

    def post(self, event: Event) -> None:
        """From a person, or from the backend's thread."""
        with self._lock:
            self._batch.events.append(event)
        self._something.set()

    # ------------------------------------------------------------ deciding thread

    def wait(self, timeout_s: float) -> None:
        self._something.wait(timeout_s)
        self._something.clear()

    def take(self) -> Batch:
        with self._lock:
            batch, self._batch = self._batch, Batch()
        return batch

    def seat(self, event: NodeJoined) -> Joined:
        """The answer to a join that was decided."""
        cluster = self.job.policy.cluster
        with self._lock:
            if event.node not in self.job.nodes:  # refused: its host is blocked
                raise RefusedError(403, f"{event.node} is not wanted; end it")
            seat = self._seats.setdefault(event.node, Seat(event.node))
            if seat.incarnation != event.incarnation:
                if seat.incarnation:
                    seat.superseded.add(seat.incarnation)
                seat.incarnation, seat.leave = event.incarnation, False
                seat.commands.clear()
                seat.sent.clear()
            seat.is_joined, seat.heard_s = True, self.clock()
            self._fit(seat)
            if seat.leave:
                raise RefusedError(403, f"{event.node} is not wanted; end it")
            return Joined(
                epoch=self.job.epoch,
                node_rank=seat.node_rank,
                heartbeat_interval_s=cluster.heartbeat_interval_s,
                orphan_timeout_s=cluster.orphan_timeout_s,
                grace_s=cluster.grace_s,
                kill_deadline_s=cluster.kill_deadline_s,
                save_deadline_s=cluster.save_deadline_s,
                warm=cluster.warm,
                procs_per_node=self.job.policy.procs_per_node,
            )

    def push(self, node: str, order: Order, epoch: int) -> None:
        """Queue a command of `epoch`."""
        with self._lock:
            seat = self._seats.get(node)
            if seat is None:
                return
            self._count += 1
            sequence = (epoch << _EPOCH_SHIFT) + self._count
            command = Command(epoch=epoch, sequence=sequence, order=order)
            seat.commands.append(command)
            seat.sent[sequence] = command
            if len(seat.sent) > MOST_COMMANDS:
                del seat.sent[next(iter(seat.sent))]
            wake = seat.wake
        if wake is not None:
            wake()

    def sync(self, job: JobState) -> None:
        """Fit the seats to what was decided."""
        with self._lock:
            changed = job.nodes is not self.job.nodes or job.ranks_epoch != self.job.ranks_epoch
            self.job = job
            if not changed and self._seats:
                return
            for name in job.nodes:
                if name not in self._seats:
                    seat = Seat(name, job.nodes[name].incarnation, heard_s=self.clock())
                    self._seats[name] = seat
            for seat in self._seats.values():
                self._fit(seat)

    def _fit(self, seat: Seat) -> None:
        node = self.job.nodes.get(seat.node)
        if node is None:
            return
        seat.node_rank = node.node_rank
        seat.ranks = self.job.ranks_of(node)
        is_it = node.incarnation == seat.incarnation
        seat.leave = is_it and node.state in OVER
        if node.state in ("lost", "evicted"):  # it is told to leave, and obeys nothing more
            seat.commands.clear()
            seat.sent.clear()

    def silences(self, now_s: float) -> dict[str, float]:
        """Seconds since each node was heard."""
        with self._lock:
            return {seat.node: now_s - seat.heard_s for seat in self._seats.values()}

    def not_told(self, nodes: Iterable[str]) -> list[str]:
        """Those of `nodes` that have not heard yet that they are to leave."""
        with self._lock:
            return [name for name in nodes if not self._seats[name].is_told]

    def close(self) -> None:
        """Long polls end; new ones do not wait."""
        with self._lock:
            self.is_closed = True
            waiting = [seat.wake for seat in self._seats.values() if seat.wake is not None]
        for wake in waiting:
            wake()

    def forgive(self, now_s: float) -> None:
        """The driver itself stood still: nobody's silence counts until now."""
        with self._lock:
            for seat in self._seats.values():
                seat.heard_s = now_s
