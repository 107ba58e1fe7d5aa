"""The progress page: "is it still moving", asked from outside, also of a rank that hangs.

64 bytes of shared memory that the agent of the node reads. Byte order is the machine's own (one
host).

| offset | bytes | field |
|---|---|---|
| 0 | 4 | sequence: odd while *issued* is being written, then two higher than before |
| 4 | 4 | CRC-32 of bytes 8 to 47 |
| 8 | 4 | magic `MSP1` |
| 12 | 4 | epoch: incarnation of the job |
| 16 | 8 | host's monotonic ns at the write |
| 24 | 4 | step |
| 28 | 2 | phase: 1 + index in `PHASES` |
| 30 | 2 | model chunk, 0xFFFF: none |
| 32 | 4 | micro-batch, 0xFFFFFFFF: none |
| 36 | 4 | CRC-32 of the name of the group of the last collective or transfer, 0: none yet |
| 40 | 4 | sequence number of that collective in its group |
| 44 | 4 | tensors and blocks that the save under way has moved so far, 0: no save that tells |
| 48 | 8 | *completed*: step << 32, phase << 24, chunk << 16, micro-batch (all ones: none) |
| 56 | 8 | reserved, 0 |

*issued* is written by the host under the seqlock. The checksum stays because Python cannot order
stores on a weakly ordered CPU: a reader never returns a mix of two records, in whatever order the
stores become visible. *completed* is one aligned 8-byte word, so that a device can write it with a
single store at the end of a chunk; 0 means nothing yet.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

# Phases of a step as the progress page numbers them: append only.
PHASES = (
    "other",
    "init",
    "data_wait",
    "forward",
    "backward",
    "grad_sync",
    "optimizer",
    "param_gather",
    "send",
    "recv",
    "checkpoint",
    "validation",
    "gc",
    "done",
    "backward_input",
    "backward_weight",
    "head",
)
_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES, 1)}

PAGE_BYTES = 64
COMPLETED_OFFSET = 48
_SEQUENCE = struct.Struct("=I")
_ISSUED = struct.Struct("=4sIQIHHIIII")  # bytes 8 to 47
_ISSUED_OFFSET = 8
_MAGIC = b"MSP1"
_NO_CHUNK, _NO_MICRO_BATCH = 0xFFFF, 0xFFFFFFFF
assert _ISSUED_OFFSET + _ISSUED.size == COMPLETED_OFFSET, _ISSUED.size


@dataclass(frozen=True, slots=True)
class Issued:
    """What the host handed out last."""

    epoch: int
    step: int
    phase: str
    monotonic_ns: int
    chunk: int | None = None
    micro_batch: int | None = None
    group_id: int | None = None  # `group_id(name)` of the last collective's group
    seq: int | None = None
    saved: int | None = None  # what the save under way has moved; None: none that tells


@dataclass(frozen=True, slots=True)
class Completed:
    """What the device, or the host where there is none, finished last."""

    step: int
    phase: str
    chunk: int | None = None
    micro_batch: int | None = None


def group_id(name: str) -> int:
    """The page's 4-byte number of a group; never 0, which means none."""
    return zlib.crc32(name.encode()) or 1


def pack_completed(done: Completed) -> int:
    """The *completed* word, to be stored whole at `COMPLETED_OFFSET`, by host or device."""
    chunk = 0xFF if done.chunk is None else done.chunk
    micro_batch = 0xFFFF if done.micro_batch is None else done.micro_batch
    return done.step << 32 | _PHASE_NUMBERS[done.phase] << 24 | chunk << 16 | micro_batch


def unpack_completed(word: int) -> Completed | None:
    """The record in a *completed* word; None where nothing has completed yet."""
    if word == 0:
        return None
    chunk, micro_batch = word >> 16 & 0xFF, word & 0xFFFF
    return Completed(
        step=word >> 32,
        phase=PHASES[(word >> 24 & 0xFF) - 1],
        chunk=None if chunk == 0xFF else chunk,
        micro_batch=None if micro_batch == 0xFFFF else micro_batch,
    )


def issued_stores(sequence: int, record: Issued) -> list[tuple[int, bytes]]:
    """The stores (offset, bytes), in order, that replace *issued* when the sequence is `sequence`.

    An odd sequence is what a writer leaves that died in the middle; the next one writes over it.
    """
    body = _ISSUED.pack(
        _MAGIC,
        record.epoch,
        record.monotonic_ns,
        record.step,
        _PHASE_NUMBERS[record.phase],
        _NO_CHUNK if record.chunk is None else record.chunk,
        _NO_MICRO_BATCH if record.micro_batch is None else record.micro_batch,
        record.group_id or 0,
        record.seq or 0,
        (record.saved or 0) & 0xFFFFFFFF,
    )
    busy = (sequence | 1) & 0xFFFFFFFF
    return [
        (0, _SEQUENCE.pack(busy)),
        (4, _SEQUENCE.pack(zlib.crc32(body))),
        (_ISSUED_OFFSET, body),
        (0, _SEQUENCE.pack((busy + 1) & 0xFFFFFFFF)),
    ]


def decode_issued(page: bytes) -> Issued | None:
    """The *issued* record of a copy of the page; None if none was written or it is torn."""
    sequence, checksum = _SEQUENCE.unpack_from(page, 0)[0], _SEQUENCE.unpack_from(page, 4)[0]
    body = page[_ISSUED_OFFSET:COMPLETED_OFFSET]
    if sequence % 2 or zlib.crc32(body) != checksum:
        return None
    magic, epoch, now_ns, step, phase, chunk, micro_batch, group, seq, saved = _ISSUED.unpack(body)
    if magic != _MAGIC:
        return None
    return Issued(
        epoch=epoch,
        step=step,
        phase=PHASES[phase - 1],
        monotonic_ns=now_ns,
        chunk=None if chunk == _NO_CHUNK else chunk,
        micro_batch=None if micro_batch == _NO_MICRO_BATCH else micro_batch,
        group_id=group or None,
        seq=seq if group else None,
        saved=saved or None,
    )


class _Page:
    """The mapped file of a progress page."""

    def __init__(self, path: Path, *, create: bool) -> None:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if os.fstat(descriptor).st_size < PAGE_BYTES:
                os.ftruncate(descriptor, PAGE_BYTES)
            self._map = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        self._completed = memoryview(self._map)[COMPLETED_OFFSET : COMPLETED_OFFSET + 8].cast("Q")

    def close(self) -> None:
        self._completed.release()
        self._map.close()


class ProgressWriter(_Page):
    """The trainer's end of the page at `path`, which it creates where no agent has."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, create=True)

    def issued(self, record: Issued) -> None:
        for offset, data in issued_stores(_SEQUENCE.unpack_from(self._map, 0)[0], record):
            self._map[offset : offset + len(data)] = data

    def completed(self, record: Completed) -> None:
        self._completed[0] = pack_completed(record)


class ProgressReader(_Page):
    """The agent's end. `issued` keeps the last whole record: a torn page is no news, not an error
    (a writer that died in the middle simply makes no progress any more)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, create=False)
        self._last: Issued | None = None

    def issued(self, attempts: int = 16) -> Issued | None:
        for _ in range(attempts):
            before = self._map[0:4]
            record = decode_issued(self._map[0:PAGE_BYTES])
            if record is not None and self._map[0:4] == before:
                self._last = record
                break
        return self._last

    def completed(self) -> Completed | None:
        return unpack_completed(self._completed[0])
