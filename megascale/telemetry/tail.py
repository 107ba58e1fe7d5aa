"""What is new at the end of a file of lines, for who wants the newest and not all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

FIRST_BYTES = 1 << 20  # of what is there already
MOST_BYTES = 8 << 20  # of what came since the last look: what is older than that is passed over


class Tail:
    """Follows one file, also one that is not there yet, was cut, or was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """Whole lines since the last call; at first those of the last FIRST_BYTES."""
        try:
            with self._path.open("rb") as file:
                data = self._read(file.fileno())
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        yield from data[:end].splitlines()

    def _read(self, descriptor: int) -> bytes:
        stat = os.fstat(descriptor)
        is_new = stat.st_ino != self._inode or stat.st_size < self._offset
        most = FIRST_BYTES if is_new else MOST_BYTES
        self._inode, self._offset = stat.st_ino, 0 if is_new else self._offset
        if stat.st_size - self._offset <= most:
            return os.pread(descriptor, stat.st_size - self._offset, self._offset)
        self._offset = stat.st_size - most
        data = os.pread(descriptor, most, self._offset)
        first = data.find(b"\n") + 1  # the line before it is cut
        self._offset += first
        return data[first:]
