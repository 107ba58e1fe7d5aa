"""Follows a rank's log and finds the lines that rules speak for, at a bounded price.

At most `BYTES_A_SECOND` (after a burst) are looked at; when a rank writes more, the middle is
passed over and counted, the newest is looked at. What the rules' words are not in is never taken
apart. At most `MOST_LINES` lines are judged a call for each word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megascale.cluster.agent.log_rules import (
    EXCEPTION,
    MOST_LINE,
    TRACEBACK,
    WORDS,
    Rule,
    classify,
    is_inside_traceback,
)

BYTES_A_SECOND = 256 << 10
BURST_BYTES = 1 << 20
TAIL_BYTES = 64 << 10
MOST_LINES = 200
_TRACEBACK = TRACEBACK.encode()
_WORDS = tuple(word.encode() for word in WORDS)


@dataclass(frozen=True)
class Match:
    """A line, cut to what a message may hold, and its rule."""

    rule: Rule
    line: str
    unix_ns: int


class LogReader:
    """Reads from `offset` on. `skipped_bytes`: never looked at, because there was too much."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.skipped_bytes = path, 0
        self._offset, self._held = offset, b""
        self._inode: int | None = None
        self._budget, self._filled_s = float(BURST_BYTES), time.monotonic()

    def read(self, *, last: bool = False) -> list[Match]:
        """New matches; with `last` (the rank has ended) the end is looked at whatever it costs."""
        data = self._held + self._new_bytes(TAIL_BYTES if last else 0)
        whole = len(data) if last else _whole(data)
        whole = max(whole, len(data) - TAIL_BYTES)  # a line without an end is not waited for
        self._held = data[whole:]
        now_ns = time.time_ns()
        return [Match(rule, line, now_ns) for rule, line in find(data[:whole])]

    def _new_bytes(self, at_least: int) -> bytes:
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            return b""
        try:
            status = os.fstat(descriptor)
            if status.st_size < self._offset or self._inode not in (None, status.st_ino):
                self._offset, self._held = 0, b""  # cut, or another file
            self._inode = status.st_ino
            allowed = max(self._allowance(), at_least)
            there = status.st_size - self._offset
            if there > allowed:
                take = min(allowed, TAIL_BYTES)
                self.skipped_bytes += there - take
                self._offset, self._held = status.st_size - take, b""
                there = take
            data = os.pread(descriptor, there, self._offset)
        except OSError:
            return b""
        finally:
            os.close(descriptor)
        self._offset += len(data)
        self._budget -= len(data)
        return data

    def _allowance(self) -> int:
        now_s = time.monotonic()
        self._budget += (now_s - self._filled_s) * BYTES_A_SECOND
        self._budget, self._filled_s = min(self._budget, BURST_BYTES), now_s
        return max(0, int(self._budget))


def _whole(data: bytes) -> int:
    """How much of `data` can be judged: whole lines, and no traceback that goes on."""
    end = data.rfind(b"\n") + 1
    start = data.rfind(_TRACEBACK, 0, end)
    if start >= 0 and _exception_line(data[:end], start) is None:
        end = data.rfind(b"\n", 0, start) + 1
    return end


def find(data: bytes) -> Iterator[tuple[Rule, str]]:
    """(rule, line) of the lines in `data` that mean something, in their order."""
    starts: set[int] = set()
    for word in _WORDS:
        at = data.find(word)
        found = 0
        while at >= 0 and found < MOST_LINES:
            starts.add(data.rfind(b"\n", 0, at) + 1)
            found += 1
            end = data.find(b"\n", at)
            at = data.find(word, end) if end >= 0 else -1
    ends = set(_exception_lines(data))
    for start in sorted(starts | ends)[: 2 * MOST_LINES]:
        line = _line(data, start)
        rule = classify(line) or (EXCEPTION if start in ends else None)
        if rule is not None:
            yield rule, line


def _exception_lines(data: bytes) -> Iterator[int]:
    at, found = data.find(_TRACEBACK), 0
    while at >= 0 and found < MOST_LINES:
        start = _exception_line(data, at)
        if start is not None:
            yield start
        at, found = data.find(_TRACEBACK, at + 1), found + 1


def _exception_line(data: bytes, traceback: int) -> int | None:
    """Where the line begins that ends the traceback; None where it has not come yet."""
    start = data.find(b"\n", traceback) + 1
    while 0 < start < len(data):
        if not is_inside_traceback(_line(data, start)):
            return start
        start = data.find(b"\n", start) + 1
    return None


def _line(data: bytes, start: int) -> str:
    end = data.find(b"\n", start)
    end = len(data) if end < 0 else end
    return data[start : min(end, start + MOST_LINE)].decode(errors="replace")
