"""The heartbeat: at a fixed rate, from a thread that waits for the driver and for nothing else.

A beat that fails is not repeated: the next one, with newer contents, follows at its time. After
`PATIENT_BEATS` failures in a row the beats get rarer, down to one in `SLOWEST_S`, each with jitter,
so that ten thousand agents do not meet a driver that has just come back at the same moment.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megascale.cluster.agent.board import Board, Report
from megascale.cluster.agent.link import Backoff, Link, LinkError, RefusedError, SeldomLog, fits
from megascale.cluster.messages import Heartbeat, Join, Joined, NodeFacts

PATIENT_BEATS = 3
SLOWEST_S = 5.0
SOONEST_S = 0.1  # between two beats, also where something happened
TIMEOUT_SHARE = 0.8  # of the interval
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Whose heartbeats these are."""

    node: str
    incarnation: str
    facts: NodeFacts


class Fence:
    """The newest epoch that any driver named; what is older comes from one that is replaced."""

    def __init__(self) -> None:
        self._epoch, self._lock = 0, threading.Lock()

    @property
    def epoch(self) -> int:
        return self._epoch

    def admits(self, epoch: int) -> bool:
        """Whether `epoch` is the newest or newer; it is remembered then."""
        with self._lock:
            if epoch < self._epoch:
                return False
            self._epoch = epoch
            return True


class Heart(threading.Thread):
    """Joins, beats, and joins again where the driver does not know us.

    joined   called with each answer to a join, in this thread
    leave    called once: the driver wants us gone, or refuses us for good (with the reason)
    done     sequence number of the newest command that was obeyed
    """

    def __init__(
        self,
        link: Link,
        identity: Identity,
        board: Board,
        fence: Fence,
        *,
        joined: Callable[[Joined], None],
        leave: Callable[[str, bool], None],
        done: Callable[[], int],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.last_contact_s = time.monotonic()
        self.is_joined = threading.Event()
        self._link, self._identity, self._board, self._fence = link, identity, board, fence
        self._on_joined, self._on_leave, self._done = joined, leave, done
        self._interval_s, self._sequence, self._failures = 1.0, 0, 0
        self._was_joined = False
        self._backoff = Backoff(self._interval_s, SLOWEST_S)
        self._wake, self._ended = threading.Event(), threading.Event()
        self._seldom = SeldomLog(_log)

    def soon(self) -> None:
        """Something happened that the driver should not wait a second for."""
        self._wake.set()

    def end(self, timeout_s: float) -> None:
        """One last beat, then no more."""
        self._ended.set()
        self._wake.set()
        self.join(timeout_s)

    def run(self) -> None:
        due_s = time.monotonic()
        while not self._ended.is_set():
            self._wake.clear()
            began_s = time.monotonic()
            self._beat()
            if began_s >= due_s or self._failures:  # else it was a beat between two
                due_s = self._next(max(due_s, began_s - self._interval_s))
            self._wake.wait(max(0.0, due_s - time.monotonic()))
            if not self._ended.is_set():
                self._ended.wait(max(0.0, began_s + SOONEST_S - time.monotonic()))
        if self.is_joined.is_set():
            self._beat()
        self._link.close()

    def _next(self, due_s: float) -> float:
        if self._failures > PATIENT_BEATS:
            return time.monotonic() + max(self._interval_s, self._backoff.next_s())
        return due_s + self._interval_s

    def _beat(self) -> None:
        try:
            heard = self._tell() if self.is_joined.is_set() else self._join()
        except LinkError as error:
            self._failures += 1
            self._seldom.warn("no driver: %s", error)
        except RefusedError as error:
            self._refused(error)
        except Exception as error:  # noqa: BLE001 - without this thread the node would be lost
            self._failures += 1
            self._seldom.warn("a heartbeat could not be written: %r", error)
        else:
            if heard:
                self._failures = 0
                self._backoff.reset()
                self.last_contact_s = time.monotonic()

    def _refused(self, error: RefusedError) -> None:
        """Whatever the reason is, the first join is the last. Later there are ranks, which only
        being unwanted, or silence, may end."""
        if error.is_final or not self._was_joined:
            self._on_leave(str(error), True)
            return
        self._failures += 1
        self.is_joined.clear()  # perhaps with the token of a new driver
        self._seldom.warn("%s", error)

    def _join(self) -> bool:
        message = Join(
            node=self._identity.node,
            incarnation=self._identity.incarnation,
            epoch=self._fence.epoch,
            unix_ns=time.time_ns(),
            facts=self._identity.facts,
            ranks=self._board.report().ranks,
        )
        joined = self._link.join(message)
        if not self._fence.admits(joined.epoch):
            return self._stale(joined.epoch)
        self._interval_s = max(joined.heartbeat_interval_s, 0.05)
        self._backoff = Backoff(self._interval_s, max(SLOWEST_S, self._interval_s))
        self._on_joined(joined)
        self.is_joined.set()
        self._was_joined = True
        time.sleep(random.uniform(0.0, 0.1) * self._interval_s)  # spreads who joined together
        return True

    def _tell(self) -> bool:
        report = self._board.report()
        self._sequence += 1
        heard = self._link.heartbeat(
            self._message(report), max(TIMEOUT_SHARE * self._interval_s, 0.05)
        )
        if not self._fence.admits(heard.epoch):
            return self._stale(heard.epoch)
        if not heard.known:
            _log.info("the driver does not know this agent; joining again")
            self.is_joined.clear()
            self._wake.set()
            return True
        report.heard()
        if heard.leave:
            self._on_leave("the driver wants this node to leave", False)
        return True

    def _stale(self, epoch: int) -> bool:
        self._seldom.warn(
            "a driver of epoch %d answered, %d is known: it was replaced and is not obeyed",
            epoch,
            self._fence.epoch,
        )
        return False

    def _message(self, report: Report) -> Heartbeat:
        message = Heartbeat(
            node=self._identity.node,
            incarnation=self._identity.incarnation,
            epoch=self._fence.epoch,
            sequence=self._sequence,
            unix_ns=time.time_ns(),
            done=self._done(),
            ranks=report.ranks,
            devices=report.devices,
            nics=report.nics,
            log=report.log,
            first_failed=report.first_failed,
        )
        if fits(message):
            return message
        bare = [r.model_copy(update={"steps": [], "noticed": []}) for r in report.ranks]
        return message.model_copy(update={"ranks": bare, "log": report.log[:8]})
