"""Parts of any size, made into runs that a disk or an object store takes well."""

from __future__ import annotations

import mmap
from collections.abc import Callable


class Gathered:
    """Hands `write` large parts as they are and gathers small ones in a page-aligned buffer.

    Each run but the rest is a multiple of `multiple` bytes. `write` must be done with a run when it
    returns. Memory: `num_bytes`, once a small part came.
    """

    def __init__(self, num_bytes: int, multiple: int, write: Callable[[memoryview], None]) -> None:
        assert num_bytes % multiple == 0, (num_bytes, multiple)
        self._num_bytes, self._multiple, self._write = num_bytes, multiple, write
        self._held: memoryview | None = None
        self._held_bytes = 0

    def append(self, part: memoryview) -> None:
        part = part.cast("B")
        while part.nbytes:
            if not self._held_bytes and part.nbytes >= self._num_bytes:
                num_bytes = part.nbytes // self._multiple * self._multiple
                self._write(part[:num_bytes])
            else:
                num_bytes = self._hold(part)
            part = part[num_bytes:]

    def rest(self) -> memoryview:
        """What was not handed out yet: shorter than `num_bytes`."""
        return self._held[: self._held_bytes] if self._held is not None else memoryview(b"")

    def _hold(self, part: memoryview) -> int:
        if self._held is None:
            self._held = memoryview(mmap.mmap(-1, self._num_bytes))
        num_bytes = min(part.nbytes, self._num_bytes - self._held_bytes)
        self._held[self._held_bytes : self._held_bytes + num_bytes] = part[:num_bytes]
        self._held_bytes += num_bytes
        if self._held_bytes == self._num_bytes:
            self._write(self._held)
            self._held_bytes = 0
        return num_bytes
