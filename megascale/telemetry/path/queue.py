"""The queue between streamers and the store: its contract.

A message is whole lines of one file and where they lie in it. A queue may lose everything it holds
(a server without a disk that restarts): the store tells by `commit` what it has safely, and a
streamer that finds `generation` changed goes back to there. So a queue needs no durability, and a
line is lost only with the file it is in.

Implementations: `local.py` (in this process), `redis_streams.py`, `kafka.py`. The contract's tests
are `tests/telemetry/path/test_queues.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

MOST_BYTES = 1 << 20  # of one message's lines, but never less than one line


@dataclass(frozen=True, slots=True)
class Message:
    """Lines `[offset, offset + len(lines))` of `source`.

    source  names a file for good: its host and path, and its inode and birth, so that a file that
            was replaced is another source
    rank    whose lines they are; -1: the node's own
    """

    source: str
    rank: int
    offset: int
    lines: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.lines)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as it was taken; `ticket` is the queue's own, for `done`."""

    message: Message
    ticket: str


class Queue(Protocol):
    """Every call has a deadline; QueueError (DataError) where the queue cannot be reached."""

    def generation(self) -> str:
        """Changes when the queue may have lost messages."""

    def publish(self, messages: Sequence[Message]) -> int:
        """Take messages in order; how many were taken. Fewer than given: it is full, try later."""

    def take(self, most: int, wait_s: float) -> list[Delivery]:
        """The oldest messages that nobody has, at most `most`; waits up to `wait_s` for the first.
        What a consumer that died had taken and not done comes again."""

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """They are stored and may be forgotten."""

    def commit(self, positions: Mapping[str, int]) -> None:
        """The store has everything of each source up to that byte."""

    def committed(self) -> Mapping[str, int]:
        """What `commit` said last, for streamers."""

    def close(self) -> None: ...
