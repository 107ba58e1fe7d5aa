"""The queue in one process: streamer and store are threads of it, and nothing is serialised.

Bounded by bytes: full, it takes no more, and streamers leave the rest in the files.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from megascale.telemetry.path.queue import Delivery, Message


class LocalQueue:
    """See `Queue`. Any number of threads on both sides; a consumer is a thread."""

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Message] = deque()
        self._taken: dict[str, Message] = {}
        self._bytes = 0
        self._committed: dict[str, int] = {}
        self._generation = uuid.uuid4().hex
        self._tickets = itertools.count()

    def generation(self) -> str:
        return self._generation

    def publish(self, messages: Sequence[Message]) -> int:
        with self._changed:
            for count, message in enumerate(messages):
                size = len(message.lines)
                if self._bytes and self._bytes + size > self._most_bytes:
                    return count
                self._bytes += size
                self._waiting.append(message)
                self._changed.notify()
        return len(messages)

    def take(self, most: int, wait_s: float) -> list[Delivery]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, wait_s)
            taken: list[Delivery] = []
            while self._waiting and len(taken) < most:
                ticket, message = str(next(self._tickets)), self._waiting.popleft()
                self._taken[ticket] = message
                taken.append(Delivery(message, ticket))
            return taken

    def done(self, deliveries: Sequence[Delivery]) -> None:
        with self._changed:
            for delivery in deliveries:
                message = self._taken.pop(delivery.ticket, None)
                self._bytes -= 0 if message is None else len(message.lines)

    def commit(self, positions: Mapping[str, int]) -> None:
        with self._changed:
            self._committed |= positions

    def committed(self, sources: Collection[str]) -> Mapping[str, int]:
        with self._changed:
            return {s: self._committed[s] for s in sources if s in self._committed}

    def ask_again(self) -> None:
        with self._changed:
            self._committed.clear()
            self._generation = uuid.uuid4().hex

    def close(self) -> None:
        """What was taken and not done comes again."""
        with self._changed:
            self._waiting.extendleft(reversed(self._taken.values()))
            self._taken.clear()
