"""Files past the page cache: what is written once and read once need not pass through it.

On the development machine (one virtual disk, ext4) a file of 1 GiB went to the disk at 2.7 GB/s
with O_DIRECT and at 0.4-1.6 GB/s through the page cache with fsync at its end. O_DIRECT asks for
buffers, offsets and lengths in multiples of what the device likes (4,096 covers all we met); the
kernel says EINVAL where they are not, and then the bytes go by way of an aligned buffer of a block.
A file system without O_DIRECT (old tmpfs, some network file systems) is written through the cache,
flushed block by block, so that progress is progress of the disk.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from megascale.storage.gathered import Gathered
from megascale.storage.interface import BLOCK_BYTES
from megascale.storage.waiting import move_all

ALIGNMENT = 4096
NUM_THREADS = 3  # two keep a disk busy while the third pins its pages


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """(descriptor, whether it goes past the page cache)."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o644), False


class NewFile:
    """A file that is written from its start to its end, durable once `finish` returned.

    Memory: one block, and for parts that are not aligned one more a thread.
    """

    def __init__(
        self, path: Path, *, doing: str, stall_s: float, moved: Callable[[int], None]
    ) -> None:
        self._doing, self._stall_s, self._moved = doing, stall_s, moved
        self._descriptor, self._is_direct = open_direct(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        )
        self._offset = 0  # what was written: a multiple of ALIGNMENT until the tail
        self._gathered = Gathered(BLOCK_BYTES, ALIGNMENT, self._write)

    def append(self, part: memoryview) -> None:
        self._gathered.append(part)

    def finish(self) -> None:
        """The rest of it, then wait until all is on the disk."""
        rest = self._gathered.rest()
        whole = rest.nbytes // ALIGNMENT * ALIGNMENT
        self._write(rest[:whole])
        self._leave_direct()
        self._write(rest[whole:])

        def flush(_: None) -> int:
            os.fsync(self._descriptor)
            return 0

        move_all([None], flush, doing=self._doing, stall_s=self._stall_s)

    def close(self) -> None:
        """Not after a stall: a thread that wakes would write to whatever has the number then."""
        os.close(self._descriptor)

    def _write(self, view: memoryview) -> None:
        """`view` behind what was written, its blocks by several threads."""
        base = self._offset
        starts = range(0, view.nbytes, BLOCK_BYTES)
        move_all(
            starts,
            lambda start: self._write_block(view[start : start + BLOCK_BYTES], base + start),
            doing=self._doing,
            stall_s=self._stall_s,
            num_threads=min(NUM_THREADS, len(starts)),
            moved=self._moved,
        )
        self._offset += view.nbytes

    def _write_block(self, view: memoryview, offset: int) -> int:
        try:
            write_at(self._descriptor, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._write_copied(view, offset)
        if not self._is_direct:
            os.fdatasync(self._descriptor)
        return view.nbytes

    def _write_copied(self, view: memoryview, offset: int) -> None:
        with mmap.mmap(-1, view.nbytes) as buffer:
            buffer[:] = view
            with memoryview(buffer) as aligned:
                try:
                    write_at(self._descriptor, aligned, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._leave_direct()  # it was opened with O_DIRECT, but does not take it
                    write_at(self._descriptor, aligned, offset)

    def _leave_direct(self) -> None:
        leave_direct(self._descriptor)
        self._is_direct = False


def leave_direct(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        num_bytes = os.pwrite(descriptor, view, offset)
        view, offset = view[num_bytes:], offset + num_bytes


def read_at(path: Path, start: int, out: memoryview) -> int:
    """Fill `out` from byte `start` of `path` on; returns how many bytes there were."""
    descriptor, is_direct = open_direct(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = 0
        if is_direct and start % ALIGNMENT == 0:
            num_bytes = _read_direct(descriptor, start, out[: out.nbytes // ALIGNMENT * ALIGNMENT])
        if is_direct:
            leave_direct(descriptor)
        return num_bytes + _read_plain(descriptor, start + num_bytes, out[num_bytes:])
    finally:
        os.close(descriptor)


def _read_plain(descriptor: int, start: int, out: memoryview, *, multiple: int = 1) -> int:
    """Bytes read: until `out` is full, the file ends, or a read ends off a `multiple`."""
    total = 0
    while total < out.nbytes:
        num_bytes = os.preadv(descriptor, [out[total:]], start + total)
        total += num_bytes
        if not num_bytes or num_bytes % multiple:
            break
    return total


def _read_direct(descriptor: int, start: int, out: memoryview) -> int:
    """What could be read past the cache: all, what is left to the end of the file, or nothing."""
    try:
        return _read_plain(descriptor, start, out, multiple=ALIGNMENT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with mmap.mmap(-1, max(out.nbytes, 1)) as buffer, memoryview(buffer) as aligned:
        try:
            num_bytes = _read_plain(descriptor, start, aligned[: out.nbytes], multiple=ALIGNMENT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0
        out[:num_bytes] = aligned[:num_bytes]
    return num_bytes
