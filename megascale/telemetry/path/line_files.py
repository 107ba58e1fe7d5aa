"""Line files as they are followed: new ones, grown ones, ones that were replaced or cut.

A file is known by its name and first line, which is a header with host, process and time: so it is
the same file after a copy, on another node of a shared file system, and after a restart, and
another one where somebody put a new file in its place.

Only whole lines are taken, so what a crash tore is never sent: the next writer cuts it off. A file
that lost what had been read of it (a host without power) goes on from its new end, a `CUT` higher.
One that was cut or replaced and has grown past its old length before anybody looked is known by the
byte before the place to read on, which was a newline; where one is there by chance, it is not.

Cost: a stat a look for a file that has not grown; memory of one message.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Container
from pathlib import Path

from megascale.telemetry.path.queue import CUT, MOST_BYTES, SEPARATOR, Message

LONGEST_LINE_BYTES = 16 << 20  # what is longer is no event
_FIRST_BYTES = 4096  # of the first line: they name the file
_RANK = re.compile(r"rank_(\d+)\.jsonl")


def telemetry_folder(run_dir: Path) -> Path:
    return run_dir / "telemetry"


def list_line_files(run_dir: Path, known: Container[str] = ()) -> dict[str, int]:
    """Names of the line files of a run, those that are known left out, each with its rank; -1: a
    node's own."""
    try:
        names = os.listdir(telemetry_folder(run_dir))
    except FileNotFoundError:
        return {}
    new = sorted(name for name in names if name not in known and name.endswith(".jsonl"))
    return {name: rank_of(name) for name in new}


def rank_of(name: str) -> int:
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else -1


class LineFile:
    """One file; `source` is None until its first line is whole."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.source: str | None = None
        self._text, self._inode = str(path), -1
        self._offset = self._num_cuts = 0
        self._searched = 0  # of a line that is too long: where its end was looked for
        self._seen: tuple[int, ...] | None = None  # nothing is new while these stay

    def identify(self) -> str | None:
        """Find out `source`, before anything is read. OSError: the file cannot be read."""
        descriptor = os.open(self._text, os.O_RDONLY)
        try:
            self.source = self._identify(descriptor)
            return self.source
        finally:
            os.close(descriptor)

    def go_to(self, position: int) -> None:
        """Read on from a position as `commit` names it."""
        self._num_cuts, self._offset = divmod(position, CUT)
        self._searched, self._seen = 0, None

    @property
    def position(self) -> int:
        """Where it is read on, as `commit` names it."""
        return self._num_cuts * CUT + self._offset

    @property
    def offset(self) -> int:
        """The same in the file itself."""
        return self._offset

    def read(self, most_bytes: int = MOST_BYTES) -> Message | None:
        """The next whole lines, about `most_bytes` of them, and go behind them; None where there
        are none yet. A file that has become another is read from its beginning; `source` says so.
        OSError: it cannot be read."""
        stat = os.stat(self._text)
        state = inode, size, _ = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if state == self._seen:
            return None
        descriptor = os.open(self._text, os.O_RDONLY)
        try:
            has_only_grown = inode == self._inode and size > self._offset
            if not has_only_grown and not self._look_again(descriptor, inode, size):
                return None
            message = self._next(descriptor, most_bytes)
            if message is None or self._offset == size:
                self._seen = state
            return message
        finally:
            os.close(descriptor)

    def _look_again(self, descriptor: int, inode: int, size: int) -> bool:
        """Go to where this file is read on, if it is not the one that it was; False while nobody
        knows what it is."""
        source = self._identify(descriptor)
        if source is None:
            return False
        if self.source is not None and source != self.source:
            self.go_to(0)
        if size < self._offset:
            self.go_to((self._num_cuts + 1) * CUT + _last_line_end(descriptor, size))
        self.source, self._inode = source, inode
        return True

    def _next(self, descriptor: int, most_bytes: int) -> Message | None:
        assert self.source is not None
        if self._searched:
            return self._pass_over(descriptor)
        data = self._bytes_from_here(descriptor, most_bytes)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == most_bytes:
            data = self._bytes_from_here(descriptor, LONGEST_LINE_BYTES)
            end = data.find(b"\n") + 1
            if not end and len(data) == LONGEST_LINE_BYTES:
                self._searched = self._offset + len(data)
                return self._pass_over(descriptor)
        if not end:
            return None
        message = Message(self.source, self.rank, self.position, data[:end])
        self._offset += end
        return message

    def _bytes_from_here(self, descriptor: int, most_bytes: int) -> bytes:
        """What was read ended with a newline. Where none is, somebody wrote the file anew, and it
        is read from its beginning."""
        if self._offset:
            data = os.pread(descriptor, most_bytes + 1, self._offset - 1)
            if data[:1] == b"\n":
                return data[1:]
            source = self._identify(descriptor)
            if not data or source is None:
                return b""  # it is being written
            self.go_to((self._num_cuts + 1) * CUT if source == self.source else 0)
            self.source = source
        return os.pread(descriptor, most_bytes, 0)

    def _pass_over(self, descriptor: int) -> Message | None:
        """A message without lines, once the end of a line that is too long is there."""
        assert self.source is not None
        while data := os.pread(descriptor, MOST_BYTES, self._searched):
            newline = data.find(b"\n")
            if newline < 0:
                self._searched += len(data)
                continue
            length = self._searched + newline + 1 - self._offset
            message = Message(self.source, self.rank, self.position, b"", passed_over=length)
            self._offset, self._searched = self._offset + length, 0
            return message
        return None

    def _identify(self, descriptor: int) -> str | None:
        first = os.pread(descriptor, _FIRST_BYTES, 0)
        end = first.find(b"\n") + 1 or _FIRST_BYTES
        if end > len(first):
            return None
        digest = hashlib.blake2b(first[:end], digest_size=8).hexdigest()
        return f"{self.path.name}{SEPARATOR}{digest}"


def _last_line_end(descriptor: int, size: int) -> int:
    """Bytes of the file up to and with its last newline."""
    end = size
    while end > 0:
        start = max(0, end - MOST_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
