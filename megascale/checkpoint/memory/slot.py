"""A memory slot: a file in memory that holds what one rank has of one step. No processes here.

    [0, 8)        magic and version         [8, 16)   length and CRC-32 of the header
    [16, ...)     header, JSON              [4088, 4096)  the mark
    [4096, ...)   table, JSON: what lies where in the body (`body.py`)
    [body_start, end)  values, from a multiple of 4,096 on

Slots of a rank that has no agent have no file: `Slot(None)` is memory of this process alone, under
a path (/proc/PID/fd/N) that other processes of the user can map while it lives.

Invariants:
1. The mark is taken away before anything else is written and set after everything else, so a writer
   that is killed on its way leaves no slot that reads as complete. (Writes of a killed process are
   seen in their order; a machine that loses power loses the slot whole.)
2. Whoever trusts the values has compared their hash first (`hashing.py`).
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megascale.checkpoint.memory.hashing import Hasher, crc_of
from megascale.errors import CheckpointError

HEADER_BYTES = 4096
MARK_AT = HEADER_BYTES - 8
PAGE_BYTES = 4096  # the values start at a multiple: a storage is written from there directly
_MAGIC = b"MSSLOT\x00\x02"
_MARK = b"complete"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_POPULATED_BYTES = 1 << 28  # by one call of a thread
_LENGTHS = struct.Struct("<8sII")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


@dataclass(frozen=True, order=True)
class Stamp:
    """Which save of which start a slot holds. Of two, the later save is greater.

    Ranks hold the same state if and only if their stamps are equal: `start` is drawn anew whenever
    trainers start, so numbers that an abandoned start gave cannot be mistaken.
    """

    epoch: int
    number: int  # of the save, counted over starts
    start: int
    step: int
    consumed_samples: int


@dataclass(frozen=True)
class Header:
    """What is known of the values.

    owner      the global rank whose state it is
    identity   of the run; states of two runs are never mixed
    layout     of the ranks, in words
    """

    stamp: Stamp
    owner: int
    identity: str
    layout: str
    table_bytes: int
    table_crc: int
    body_bytes: int
    body_hash: str

    @property
    def body_start(self) -> int:
        return body_start(self.table_bytes)

    @property
    def image_bytes(self) -> int:
        """Of the file."""
        return self.body_start + self.body_bytes


def body_start(table_bytes: int) -> int:
    """Where the values of a slot with such a table begin."""
    return -(-(HEADER_BYTES + table_bytes) // PAGE_BYTES) * PAGE_BYTES


class Slot:
    """One slot file, mapped; None: of this process alone. Creating the object touches nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._descriptor: int | None = None  # of memory without a file
        self._close: weakref.finalize[..., Slot] | None = None
        self._map: mmap.mmap | None = None
        self._image: Tensor | None = None
        self._unregister: weakref.finalize[..., Slot] | None = None

    @property
    def path(self) -> Path:
        """Under which it can be opened, by others too."""
        if self._file is not None:
            return self._file
        number = "none" if self._descriptor is None else self._descriptor
        return Path(f"/proc/{os.getpid()}/fd/{number}")

    @property
    def image(self) -> Tensor:
        """All of it, uint8. The file must be there."""
        if self._image is None:
            with self.path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
            self._image = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._image

    @property
    def num_bytes(self) -> int:
        """Of the file; 0 where there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def allocate(self, num_bytes: int) -> None:
        """Make the file this large, all of it backed by memory, so that no write can fail later.

        What it held is gone, unless it has this size already. Raises CheckpointError where there is
        no room, and gives back what it took.
        """
        if self.num_bytes == num_bytes:
            return
        self.release()
        descriptor = self._create()
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            self.release()
            raise CheckpointError(self._why_not(error, num_bytes)) from error
        finally:
            if self._file is not None:
                os.close(descriptor)

    def _create(self) -> int:
        """An open descriptor; of memory without a file it stays open, and is the slot."""
        if self._file is None:
            self._descriptor = os.memfd_create("megascale-slot")
            self._close = weakref.finalize(self, os.close, self._descriptor)
            return self._descriptor
        try:
            return os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CheckpointError(f"{self._file} cannot be made ({error.strerror})") from error

    def _why_not(self, error: OSError, num_bytes: int) -> str:
        if error.errno != errno.ENOSPC or self._file is None:
            return f"a memory slot of {num_bytes:,} bytes cannot be made: {error.strerror}"
        space = os.statvfs(self._file.parent)
        return (
            f"{self._file} needs {num_bytes:,} bytes, {self._file.parent} has "
            f"{space.f_bavail * space.f_frsize:,} free; make /dev/shm larger (containers: "
            "--shm-size), or set checkpoint.memory_interval = 0"
        )

    def populate(self, num_threads: int = 1) -> None:
        """Have all pages mapped now, without the interpreter's lock: the first copy to fresh pages
        was measured at 0.7 GB/s, the second at 27; registering 8 GiB with CUDA took 6.3 s, behind
        this by 8 threads 0.4 s and this 2.7."""
        address, end = self.image.data_ptr(), len(self.image)
        advise = ctypes.CDLL(None).madvise

        def part(start: int) -> None:  # refused by kernels before 5.14: then the first copy does it
            length = min(_POPULATED_BYTES, end - start)
            advise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _POPULATE_WRITE)

        with ThreadPoolExecutor(num_threads, thread_name_prefix="slot-pages") as pool:
            list(pool.map(part, range(0, end, _POPULATED_BYTES)))

    def register(self) -> int:
        """Let CUDA copy to here by itself. Its error code; 0: it does, until the memory goes."""
        address = self.image.data_ptr()
        status = int(torch.cuda.cudart().cudaHostRegister(address, len(self.image), 0))
        if status == 0:
            # An address that is mapped anew, registered still, would be refused.
            self._unregister = weakref.finalize(self, _unregister, address)
            self._unregister.atexit = False  # CUDA may be gone by then
        else:
            with suppress(RuntimeError):  # the runtime gives its last error to whoever comes next
                torch.zeros(1, device="cuda")
        return status

    def release(self) -> None:
        """Give the memory back."""
        if self._unregister is not None:
            self._unregister()
        self._map = self._image = self._unregister = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        elif self._close is not None:
            self._close()
            self._descriptor = self._close = None

    # ------------------------------------------------------------ reading

    def header(self) -> Header | None:
        """None where the slot is not complete."""
        if self.num_bytes < HEADER_BYTES:
            return None
        page = self.image[:HEADER_BYTES].numpy().tobytes()
        if page[MARK_AT:] != _MARK:
            return None
        magic, length, crc = _LENGTHS.unpack_from(page)
        data = page[_LENGTHS.size : _LENGTHS.size + length]
        if magic != _MAGIC or zlib.crc32(data) != crc:
            return None
        content = json.loads(data)
        header = Header(**{**content, "stamp": Stamp(**content["stamp"])})
        return header if header.image_bytes == len(self.image) else None

    def is_whole(self, header: Header, hasher: Hasher) -> bool:
        """Compare table and values with their hashes; reads all of them."""
        table = self.image[HEADER_BYTES : HEADER_BYTES + header.table_bytes]
        if crc_of(table) != header.table_crc:
            return False
        return hasher.hash_of(self.image[header.body_start :]) == header.body_hash

    # ------------------------------------------------------------ writing

    def begin(self) -> None:
        """From here on the slot is not complete."""
        if self.num_bytes >= HEADER_BYTES:
            self._write(MARK_AT, bytes(len(_MARK)))

    def write_table(self, table: bytes) -> None:
        self._write(HEADER_BYTES, table)

    def finish(self, header: Header) -> None:
        """Write the header, then the mark: the values are in place."""
        data = json.dumps(asdict(header)).encode()
        assert _LENGTHS.size + len(data) <= MARK_AT, f"a header of {len(data)} bytes"
        self._write(0, _LENGTHS.pack(_MAGIC, len(data), zlib.crc32(data)) + data)
        self.mark()

    def mark(self) -> None:
        """Everything else is in place."""
        self._write(MARK_AT, _MARK)

    def _write(self, position: int, data: bytes) -> None:
        self.image  # noqa: B018 - maps it
        assert self._map is not None
        self._map[position : position + len(data)] = data
