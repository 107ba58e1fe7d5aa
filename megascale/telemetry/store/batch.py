"""A batch of messages as lines: where each begins, what kind it is, in which start it lies.

Everything that is a line's is an array over the lines of the batch, made once; only messages,
headers and odd lines are walked one by one. A header changes the start and the clock of the lines
behind it, in the middle of a message too.

`B` bytes of the batch, `L` its lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.path.queue import CUT, Message
from megascale.telemetry.store.odd_lines import Unreadable, read_line, torn_in_front
from megascale.telemetry.store.segments import Position, arrow

_NEWLINE, _CLOSE = b"\n}"
_PREFIX = b'{"v":1,"kind":"%s",'
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class OddLine:
    """A line that was read by itself: its number in the batch, and its checked record."""

    line: int
    kind: str
    record: dict[str, Any]


class Batch:
    """`messages` are whole lines, in order of each source; `positions` where their sources stand.

    After `place`, `positions` is how far each source is read with this batch.
    """

    def __init__(self, messages: Sequence[Message], positions: Mapping[str, Position]) -> None:
        self.messages, self.positions = messages, dict[str, Position]()
        self._before = positions
        self._data = b"".join([message.lines for message in messages])
        self._bytes_B = np.frombuffer(self._data, np.uint8)
        self._end_L = np.flatnonzero(self._bytes_B == _NEWLINE) + 1
        self.num_lines = len(self._end_L)
        self._begin_L = np.concatenate([[0], self._end_L[:-1]]).astype(np.int64)[: self.num_lines]
        sizes = np.array([len(message.lines) for message in messages], np.int64)
        self._message_end = np.cumsum(sizes)
        self._message_begin = self._message_end - sizes
        self._message_L = np.searchsorted(self._message_end, self._begin_L, side="right")
        self._refused: list[tuple[int, str]] = []
        self._lines = self._arrow_lines()

    # ------------------------------------------------------------ lines

    def lines_of(self, kinds: Collection[str]) -> dict[str, Integers]:
        """Numbers of the lines that a recorder wrote as one of `kinds`, and that Arrow may read."""
        from pyarrow import compute

        usable_L = self._bytes_B[np.maximum(self._end_L - 2, 0)] == _CLOSE
        if not self._data.isascii() or b"\0" in self._data:
            # Arrow stops at a zero byte, and takes any other for text.
            odd_B = np.flatnonzero((self._bytes_B >= 128) | (self._bytes_B == 0))
            usable_L[np.searchsorted(self._end_L, odd_B, side="right")] = False
        found = {}
        for kind in kinds:
            mask_L = compute.starts_with(self._lines, _PREFIX % kind.encode())
            found[kind] = np.flatnonzero(np.asarray(mask_L) & usable_L)
        return found

    def bytes_of(self, lines: Integers) -> Any:
        """These lines as one buffer."""
        pa = arrow()
        taken = self._lines.take(pa.array(lines))
        _, offsets, data = taken.buffers()
        ends = np.frombuffer(offsets, np.int32)[taken.offset : taken.offset + len(taken) + 1]
        return data.slice(int(ends[0]), int(ends[-1] - ends[0]))

    def _arrow_lines(self) -> Any:
        pa = arrow()
        offsets = np.zeros(self.num_lines + 1, np.int32)
        offsets[1:] = self._end_L
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._data)]
        return pa.BinaryArray.from_buffers(pa.binary(), self.num_lines, buffers)

    def read_odd(self, lines: Integers, phases: Collection[str]) -> Iterator[OddLine]:
        """Read these one by one; what cannot be read is counted."""
        for line in lines.tolist():
            text = self._data[self._begin_L[line] : self._end_L[line]]
            if text.isspace():
                continue
            try:
                yield OddLine(line, *read_line(text, phases))
            except Unreadable as error:
                self.refuse(line, str(error))
                whole = torn_in_front(text)
                if whole is not None:
                    try:
                        yield OddLine(line, *read_line(whole, phases))
                    except Unreadable:
                        continue  # it is counted already

    # ------------------------------------------------------------ where a line lies

    def place(self, headers: Sequence[OddLine]) -> None:
        """Number the starts, and set their clocks: from here on the lines know theirs."""
        by_line = sorted(headers, key=lambda header: header.line)
        first_lines = np.searchsorted(self._begin_L, self._message_begin).tolist()
        lines, starts, shifts = list[int](), list[int](), list[int | None]()
        following = 0
        for message, first, behind in zip(
            self.messages, first_lines, [*first_lines[1:], self.num_lines], strict=True
        ):
            source, _, offset, text, passed_over = message
            at = self.positions.get(source) or self._before[source]
            _, rank, num_headers, shift_ns = at
            lines.append(first)
            starts.append(num_headers - 1 if num_headers else 0)
            shifts.append(shift_ns)
            while following < len(by_line) and by_line[following].line < behind:
                header = by_line[following]
                following += 1
                num_headers += 1
                shift_ns = header.record["unix_ns"] - header.record["monotonic_ns"]
                lines.append(header.line)
                starts.append(num_headers - 1)
                shifts.append(shift_ns)
            end = offset + passed_over + len(text)
            self.positions[source] = Position(end, rank, num_headers, shift_ns)
        self._first_line, self._start = np.array(lines, np.int64), np.array(starts, np.int64)
        self._shift_ns = np.array([shift_ns or 0 for shift_ns in shifts], np.int64)
        self._is_placed = np.array([shift_ns is not None for shift_ns in shifts], bool)

    def is_own(self, lines: Integers, ranks: Integers) -> Mask:
        """Whether a line is of the rank whose file it is in. In a node's own, any may be."""
        file_ranks = np.array([message.rank for message in self.messages], np.int64)
        of_file = file_ranks[self._message_L[lines]]
        own: Mask = (of_file == ranks) | (of_file < 0)
        return own

    def starts(self, lines: Integers) -> Integers:
        starts: Integers = self._start[self._states(lines)]
        return starts

    def at_wall_time(self, lines: Integers, times_ns: Any) -> Any:
        """An Arrow column of monotonic times in wall time; null where no header places them."""
        from pyarrow import compute

        states = self._states(lines)
        shifts = arrow().array(self._shift_ns[states], mask=~self._is_placed[states])
        return compute.add(times_ns, shifts)

    def _states(self, lines: Integers) -> Integers:
        # Of several states that begin at a line the last counts: messages without lines have none.
        return np.searchsorted(self._first_line, lines, side="right") - 1

    # ------------------------------------------------------------ what cannot be read

    def refuse(self, line: int, why: str) -> None:
        self._refused.append((line, why))

    def unreadable(self) -> list[dict[str, Any]]:
        """Rows of `unreadable`: by file, start and reason, the first of them and how many."""
        rows: dict[tuple[str, int, str], dict[str, Any]] = {}
        starts = self.starts(np.array([line for line, _ in self._refused], np.int64)).tolist()
        for (line, why), start in sorted(zip(self._refused, starts, strict=True)):
            message = self.messages[self._message_L[line]]
            within = int(self._begin_L[line] - self._message_begin[self._message_L[line]])
            offset = message.offset + message.passed_over + within
            _count(rows, message, start, offset, why)
        for message in self.messages:
            if message.passed_over:
                at = self._before[message.source]
                why = f"a line of {message.passed_over} bytes"
                _count(rows, message, max(at.num_headers - 1, 0), message.offset, why)
        return list(rows.values())


def _count(
    rows: dict[tuple[str, int, str], dict[str, Any]],
    message: Message,
    start: int,
    offset: int,
    why: str,
) -> None:
    row = rows.setdefault(
        (message.source, start, why),
        {
            "rank": message.rank,
            "start": start,
            "file": message.file,
            "offset": offset % CUT,
            "count": 0,
            "why": why,
        },
    )
    row["count"] += 1
