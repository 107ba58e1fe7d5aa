"""The kinds of events: what a line of a rank's file can say.

Times are nanoseconds on the host's CLOCK_MONOTONIC; the header's anchor places them in wall time,
device times are already converted (`Anchor` events say how well). A value that is not known is
absent, never a placeholder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megascale.topology import Mesh

ClockKind = Literal["device", "host"]

# Classes of work on a device, which the waterfall of a step tells apart (`Span.work`).
WORK = ("gemm", "attention", "elementwise", "tp", "pp", "dp", "optimizer", "host")


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
    num_bytes: int | None = None  # that this rank sends, or receives; of a collective in a ring
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
class Ongoing:
    """What a rank was in when a collective had not come in time (MegaScale 5.2). A rank that hangs
    by itself cannot say so: the ranks without this record are the suspects.

    t_ns, waited_ns  when it is said, and since when `name` is open
    phase            of `PHASES`, as on the progress page
    seq              which operation of `group`, a channel of the pipeline is one; absent where the
                     wait has no number: then who stands at the same `name` and `op` has come
    peers            global ranks of the group, this one left out; of a transfer its other end
    posted           the last operation that this rank has come to, by group: so others see whether
                     it has come to theirs
    error            where the wait ended with one
    """

    kind: ClassVar[str] = "ongoing"
    rank: int
    t_ns: int
    waited_ns: int
    name: str
    step: int | None = None
    phase: str | None = None
    chunk: int | None = None
    micro_batch: int | None = None
    op: str | None = None
    group: str | None = None
    seq: int | None = None
    peers: Sequence[int] = ()
    posted: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Bytes that a port had sent and received at one instant. Of a node's own file `rank` is -1.

    port               "nvlink0.3", "eth0", "mlx5_0/1"
    speed_bytes_per_s  what its link can do in one direction, where that is known
    congestion         marks of congestion so far (ECN, pauses, discards), where they are counted
    """

    kind: ClassVar[str] = "counters"
    rank: int
    host: str
    port: str
    t_ns: int
    sent_bytes: int
    received_bytes: int
    speed_bytes_per_s: float | None = None
    congestion: int | None = None


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


Event = Header | Span | Sums | Step | Incident | Ongoing | Counters | Anchor | Dropped


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
