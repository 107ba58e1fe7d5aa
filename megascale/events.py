"""What a rank says about itself: the line-JSON event schema and the progress page (MegaScale 5).

Events answer "where did the time go", after the fact and in detail. Each rank writes a file of
lines, one event a line, the header first. Times are nanoseconds on the host's CLOCK_MONOTONIC; the
header's anchor places them in wall time, device times are already converted (`Anchor` events say
how well). A value that is not known is absent, never a placeholder.

The progress page answers "is it still moving" from outside, also when the rank is hung: 64 bytes of
shared memory that the agent of the node reads. Byte order is the machine's own (one host).

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
| 44 | 4 | reserved, 0 |
| 48 | 8 | *completed*: step << 32, phase << 24, chunk << 16, micro-batch (all ones: none) |
| 56 | 8 | reserved, 0 |

*issued* is written by the host under the seqlock. The checksum stays because Python cannot order
stores on a weakly ordered CPU: a reader never returns a mix of two records, in whatever order the
stores become visible. *completed* is one aligned 8-byte word, so that a device can write it with a
single store at the end of a chunk; 0 means nothing yet.

Lines and page share this file, above the usual length, because `train` and `cluster` meet through
it and nowhere else: it is the one place that both ends read.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from megascale.errors import DataError
from megascale.topology import Mesh

SCHEMA_VERSION = 1

ClockKind = Literal["device", "host"]

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

# Classes of work on a device, which the waterfall of a step tells apart (`Span.work`).
WORK = ("gemm", "attention", "elementwise", "tp", "pp", "dp", "optimizer", "host")
_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First line of a file, and again after each restart of the rank: who writes, on what."""

    kind: ClassVar[str] = "header"
    rank: int  # global, as in every event
    world_size: int
    tensor: int
    data: int
    pipeline: int
    tp_rank: int
    dp_rank: int
    pp_rank: int
    host: str
    pid: int
    epoch: int
    unix_ns: int  # wall time and ...
    monotonic_ns: int  # ... monotonic time of one instant
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One timed piece of work. `step` is absent outside the loop's steps."""

    kind: ClassVar[str] = "span"
    rank: int
    name: str
    t0_ns: int
    dur_ns: int
    clock: ClockKind
    stream: str = "compute"  # what runs in order with it: a row of the timeline
    step: int | None = None
    chunk: int | None = None  # model chunk on this rank
    micro_batch: int | None = None
    op: str | None = None  # of a collective or transfer: all_gather, send, ...
    group: str | None = None
    seq: int | None = None  # counts the operations of `group`
    peer: int | None = None  # global rank at the other end of a transfer
    num_bytes: int | None = None
    payload: str | None = None  # of a transfer: activation, gradient
    bucket: str | None = None  # parameters that are communicated as one
    work: str | None = None  # the class of work whose time it is, where that is known (`WORK`)
    issued_ns: int | None = None  # when the host launched its start; of a device's clock
    derived: bool | None = None  # computed from other measurements, not timed itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Time by span name over one step: `{"forward": {"total_ns": 81, "count": 8}}`."""

    kind: ClassVar[str] = "sum"
    rank: int
    step: int
    sums: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A finished step; `sampled` where its spans are in the file too.

    A device that has work queued passes the step's end later than the host launched it: by
    `t0_ns + dur_ns - issued_ns`.
    """

    kind: ClassVar[str] = "step"
    rank: int
    step: int
    t0_ns: int
    dur_ns: int
    clock: ClockKind
    sampled: bool
    launch_ns: int | None = None  # time that the host took for it
    issued_ns: int | None = None  # when the host was done with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something out of the ordinary, or rare: nonfinite, checkpoint, rollback, signal, error."""

    kind: ClassVar[str] = "incident"
    rank: int
    name: str
    t_ns: int
    step: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One instant on two clocks: the host's monotonic one, and the device's or wall time."""

    kind: ClassVar[str] = "anchor"
    rank: int
    clock: Literal["device", "unix"]
    t_ns: int  # host monotonic
    reading_ns: int  # the other clock
    error_ns: int  # half the interval in which both were read
    drift_ppm: float | None = None  # how much faster the other clock runs, once known


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Events lost so far because a buffer was full, or the file could not be written."""

    kind: ClassVar[str] = "dropped"
    rank: int
    where: Literal["recorder", "writer"]
    count: int


Event = Header | Span | Sums | Step | Incident | Anchor | Dropped
_KINDS: dict[str, type[Any]] = {
    cls.kind: cls for cls in (Header, Span, Sums, Step, Incident, Anchor, Dropped)
}
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in _KINDS.values()}


def run_header(
    mesh: Mesh,
    rank: int,
    *,
    host: str,
    epoch: int = 0,
    device: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> Header:
    """The header of global rank `rank`, its clock anchor taken now."""
    at = mesh.coordinates(rank)
    return Header(
        rank=rank,
        world_size=mesh.world_size,
        tensor=mesh.tensor,
        data=mesh.data,
        pipeline=mesh.pipeline,
        tp_rank=at.tp_rank,
        dp_rank=at.dp_rank,
        pp_rank=at.pp_rank,
        host=host,
        pid=os.getpid(),
        epoch=epoch,
        unix_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        device=device,
        versions=versions or {},
    )


def to_line(event: Event) -> str:
    """One line of JSON with a final newline. Absent values are left out."""
    record: dict[str, Any] = {"v": SCHEMA_VERSION, "kind": event.kind}
    for name in _FIELDS[type(event)]:
        value = getattr(event, name)
        if value is not None:
            record[name] = value
    if isinstance(event, Incident):
        record["detail"] = {key: _json_number(value) for key, value in event.detail.items()}
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def _json_number(value: Any) -> Any:
    """JSON has no NaN and no infinity; in an incident they are the message: 'nan', 'inf'."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_line(line: str | bytes) -> Event:
    """The event of one line. DataError for what this version's schema does not describe."""
    try:
        record = json.loads(line)
        version, kind = record.pop("v"), record.pop("kind")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"not an event line ({error}): {line[:120]!r}") from None
    if version != SCHEMA_VERSION or kind not in _KINDS:
        raise DataError(
            f"event of schema version {version}, kind {kind!r}; this program reads version "
            f"{SCHEMA_VERSION} with kinds {', '.join(_KINDS)}"
        )
    try:
        event: Event = _KINDS[kind](**record)
    except TypeError as error:
        raise DataError(
            f"event of kind {kind!r} has other fields ({error}): {line[:120]!r}"
        ) from None
    return event


def read_events(path: Path) -> Iterator[Event]:
    """Events of a rank's file, also while it grows: a last line without newline is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield parse_line(line)


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
        0,
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
    magic, epoch, now_ns, step, phase, chunk, micro_batch, group, seq, _ = _ISSUED.unpack(body)
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
