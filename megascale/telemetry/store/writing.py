"""The writer of a store: takes messages of any queue or file, commits segments.

It alone knows how far each file is stored, from the segments themselves. A message that it has is
passed over, one that it has in part is cut, one that leaves a gap is refused: its sender goes back.
So messages may come twice and in pieces, and nothing is stored twice or left out.
A store has one writer at a time, which holds a lock of the file system; it ends with the process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from megascale.telemetry.path.queue import CUT, Message, file_of
from megascale.telemetry.store.columns import Columns
from megascale.telemetry.store.segments import (
    Position,
    clean_aside,
    live_segments,
    next_number,
    stored_positions,
    write_segment,
)

FLUSH_BYTES = 32 << 20  # of lines, in one segment at most
FLUSH_MESSAGES = 32768
_FOR_LIFE = b"store\n"


class Admitted(Enum):
    TAKEN = "taken"
    KNOWN = "known"  # all of it is stored, or will be with the next commit
    GAP = "gap"  # bytes before it are missing


class StoreLock:
    """The right to write a store. A context; `acquire` first. The file says whether who has it
    keeps it for life, so that nobody waits for that."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / ".lock"
        self._descriptor: int | None = None

    def acquire(self, *, for_life: bool = False) -> bool:
        """Whether nobody else had it. OSError: the folder cannot be written."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _FOR_LIFE if for_life else b"", 0)
        self._descriptor = descriptor
        return True

    def is_for_life(self) -> bool:
        """Whether who has it will not give it back soon."""
        return self._file.read_bytes() == _FOR_LIFE

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StoreWriter:
    """For one thread, which holds the `StoreLock` of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        clean_aside(folder)
        self._positions: dict[str, Position] = {}
        self._num_headers: dict[str, int] = {}  # by file, of all that had its name
        self._learn(stored_positions(live_segments(folder)))
        self._next = next_number(folder)
        self._columns = Columns()
        self._pending: list[Message] = []
        self._ahead: dict[str, int] = {}  # where a source stands with what is pending
        self.pending_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to commit, however little time has passed."""
        return self.pending_bytes >= FLUSH_BYTES or len(self._pending) >= FLUSH_MESSAGES

    def stored(self) -> dict[str, int]:
        """How far each source is stored."""
        return {source: position.offset for source, position in self._positions.items()}

    def stands_at(self, source: str) -> int:
        """How far a source is stored, or will be with the next commit."""
        at = self._ahead.get(source)
        known = self._positions.get(source)
        return at if at is not None else known.offset if known is not None else 0

    def admit(self, message: Message) -> Admitted:
        """Take what is new of a message, for the next commit."""
        at = self.stands_at(message.source)
        if message.end <= at:
            return Admitted.KNOWN
        if message.offset > at and message.offset // CUT == at // CUT:
            return Admitted.GAP
        if message.offset < at:
            message = _behind(message, at)
        self._pending.append(message)
        self.pending_bytes += len(message.lines)
        self._ahead[message.source] = message.end
        return Admitted.TAKEN

    def commit(self) -> dict[str, int]:
        """Store what was taken, durably; the new positions of its sources. DataError: it cannot be
        written; everything is kept for the next try."""
        if not self._pending:
            return {}
        before = {m.source: self._position(m.source, m.rank) for m in self._pending}
        converted = self._columns.convert(self._pending, before)
        write_segment(self.folder, converted.tables, converted.positions, number=self._next)
        self._next += 1
        self._learn(converted.positions)
        self._pending, self._ahead, self.pending_bytes = [], {}, 0
        return {source: position.offset for source, position in converted.positions.items()}

    def _position(self, source: str, rank: int) -> Position:
        """Of a file that is new, the beginning; its first header is one more start of the rank."""
        known = self._positions.get(source)
        if known is not None:
            return known
        return Position(0, rank, num_headers=self._num_headers.get(file_of(source), 0))

    def _learn(self, positions: Mapping[str, Position]) -> None:
        self._positions |= positions
        for source, position in positions.items():
            file = file_of(source)
            known = self._num_headers.get(file, 0)
            self._num_headers[file] = max(known, position.num_headers)


def _behind(message: Message, at: int) -> Message:
    """What lies behind byte `at` of it: the end of a line there, too."""
    skipped = at - message.offset
    if skipped < message.passed_over:
        return Message(
            message.source, message.rank, at, message.lines, message.passed_over - skipped
        )
    lines = message.lines[skipped - message.passed_over :]
    return Message(message.source, message.rank, at, lines)
