"""Commands in, results out; a thread each.

A command is obeyed once: those up to the newest sequence number seen are passed over. One of an
older epoch than the fence knows is refused and answered. A result is kept until the driver took it,
the newest `MOST_RESULTS`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from megascale.cluster.agent.heartbeat import Fence, Heart, Identity
from megascale.cluster.agent.link import Backoff, Link, LinkError, RefusedError, SeldomLog, fits
from megascale.cluster.messages import TEXT, Command, Result

MOST_RESULTS = 256
_log = logging.getLogger(__name__)


class Results(threading.Thread):
    """Posts results; `put` never waits."""

    def __init__(self, link: Link, identity: Identity) -> None:
        super().__init__(name="results", daemon=True)
        self._link, self._identity = link, identity
        self._waiting: deque[Result] = deque(maxlen=MOST_RESULTS)
        self._wake, self._ended = threading.Event(), threading.Event()
        self._unfinished: set[int] = set()
        self._newest = 0
        self._lock = threading.Lock()

    def begun(self, command: Command) -> None:
        with self._lock:
            self._unfinished.add(command.sequence)
            self._newest = max(self._newest, command.sequence)

    def done(self) -> int:
        """Every command up to this one has come to its end."""
        with self._lock:
            return min(self._unfinished) - 1 if self._unfinished else self._newest

    def put(
        self,
        command: Command,
        *,
        ok: bool,
        reason: str = "",
        detail: dict[str, object] | None = None,
    ) -> None:
        result = Result(
            node=self._identity.node,
            incarnation=self._identity.incarnation,
            epoch=command.epoch,
            sequence=command.sequence,
            ok=ok,
            reason=reason[:TEXT],
            detail=detail or {},
        )
        if not fits(result):
            said = f"{result.reason}; the detail was too large to be sent".lstrip("; ")
            result = result.model_copy(update={"detail": {}, "reason": said[-TEXT:]})
        with self._lock:
            self._unfinished.discard(command.sequence)
            self._waiting.append(result)
        self._wake.set()

    def end(self, timeout_s: float) -> None:
        """Give what waits one more try each."""
        self._ended.set()
        self._wake.set()
        self.join(timeout_s)

    def run(self) -> None:
        backoff, seldom = Backoff(0.2, 5.0), SeldomLog(_log)
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._waiting:
                result = self._waiting[0]
                try:
                    if not self._link.result(result).known:
                        raise LinkError("the driver does not know this agent yet")
                except LinkError as error:
                    seldom.warn("a result was not taken: %s", error)
                    if self._ended.is_set():
                        return
                    self._ended.wait(backoff.next_s())
                    continue
                except RefusedError as error:
                    _log.error("the result of command %d is lost: %s", result.sequence, error)
                backoff.reset()
                with self._lock:
                    if self._waiting and self._waiting[0] is result:
                        self._waiting.popleft()
            if self._ended.is_set():
                self._link.close()
                return


class Orders(threading.Thread):
    """The long poll; hands what is to be obeyed to `take`."""

    def __init__(
        self,
        link: Link,
        identity: Identity,
        heart: Heart,
        fence: Fence,
        results: Results,
        take: Callable[[Command], None],
    ) -> None:
        super().__init__(name="commands", daemon=True)
        self._link, self._identity, self._heart, self._fence = link, identity, heart, fence
        self._results, self._take = results, take
        self._seen = 0

    def run(self) -> None:
        backoff, seldom = Backoff(0.2, 5.0), SeldomLog(_log)
        pause = threading.Event()
        while True:
            self._heart.is_joined.wait()
            try:
                commands = self._link.commands(
                    self._identity.node, self._identity.incarnation, self._seen
                )
            except (LinkError, RefusedError) as error:
                seldom.warn("no commands: %s", error)
                pause.wait(backoff.next_s())
                continue
            backoff.reset()
            for command in commands:
                self.receive(command)

    def receive(self, command: Command) -> None:
        """Obey, refuse or pass over."""
        if command.sequence <= self._seen:
            return
        self._seen = command.sequence
        self._results.begun(command)
        if self._fence.admits(command.epoch):
            self._take(command)
            return
        reason = f"epoch {command.epoch} is over; this agent knows {self._fence.epoch}"
        _log.warning("command %d (%s) refused: %s", command.sequence, command.order.kind, reason)
        self._results.put(command, ok=False, reason=reason)
