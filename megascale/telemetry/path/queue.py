"""The queue between streamers and the store: its contract.

A message is whole lines of one file and where they lie in it. A queue may lose everything it holds
(a server without a disk that restarts): the store tells by `commit` what it has safely, and a
streamer that finds `generation` changed goes back to there. So a queue needs no durability, and a
line is lost only with the file it is in.

Implementations: `local.py` (in this process), `redis_streams.py`, `kafka.py`. The contract's tests
are `tests/telemetry/path/test_queues.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megascale.errors import DataError

MOST_BYTES = 1 << 20  # of one message's lines, but never less than one line
SEPARATOR = ":"  # in a source, behind the file's name
CUT = 1 << 48  # what a cut adds to the offsets behind it


class Message(NamedTuple):
    """Bytes `[offset, end)` of `source`: whole lines.

    source       names a file for good, by its name and first line, wherever it lies: one that was
                 replaced is another source, one that was copied or is seen by two nodes is the same
    rank         whose lines they are; -1: the node's own
    offset       in the file; and `CUT` for each time that the file was cut behind what had been
                 read of it (a host that lost power), so that positions only grow
    passed_over  bytes before `lines` that are no event: a line longer than any
    """

    source: str
    rank: int
    offset: int
    lines: bytes
    passed_over: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.passed_over + len(self.lines)

    @property
    def file(self) -> str:
        return file_of(self.source)


def file_of(source: str) -> str:
    """The name of the file that a source is."""
    return source.rpartition(SEPARATOR)[0]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as it was taken; `ticket` is the queue's own, for `done`."""

    message: Message
    ticket: str


class QueueError(DataError):
    """The queue cannot be reached, or answers otherwise than a queue: try again later."""


class Queue(Protocol):
    """Every call has a deadline; QueueError where the queue cannot be reached."""

    def generation(self) -> str:
        """Changes when the queue may have lost messages, and by `ask_again`."""

    def publish(self, messages: Sequence[Message]) -> int:
        """Take messages in order; how many were taken. Fewer than given: it is full, try later."""

    def take(self, most: int, wait_s: float) -> list[Delivery]:
        """The oldest messages that nobody has, about `most`; waits up to `wait_s` for the first.
        What a consumer that died had taken and not done comes again."""

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """They are stored and may be forgotten."""

    def commit(self, positions: Mapping[str, int]) -> None:
        """The store has everything of each source up to that byte."""

    def committed(self, sources: Collection[str]) -> Mapping[str, int]:
        """What `commit` said last of these, for streamers; a source it never named is absent."""

    def ask_again(self) -> None:
        """The store misses bytes that nobody sends any more. What was committed is forgotten and
        the generation changes: streamers go back to what is committed next."""

    def close(self) -> None: ...
