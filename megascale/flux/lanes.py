"""What the chunked forms share: cutting and grouping of blocks, two lanes of GEMMs, waits, sends.

A chunked operator has three streams. The current stream and a second one (the *lanes*) hold GEMMs,
so that the last wave of one GEMM, which fills only a part of the device, runs beside the first wave
of the next. The arena's copy stream holds transfers, which use copy engines and no SM.

Every fork and join is an event: a call can be captured into a graph. Everything is joined before a
form returns, so temporaries of the current stream's allocator need no `record_stream`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megascale.flux.tiles import ceil_div

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot

_ROWS = 128  # rows (columns) of a block are a multiple of a GEMM tile's where there are enough


def block_length(length: int, count: int, multiple: int = _ROWS) -> int:
    """Rows of a block when `length` rows are cut into at most `count`: a multiple of `multiple`
    where a block has as many, so that no GEMM tile is computed twice in part."""
    block = max(1, ceil_div(length, count))
    return ceil_div(block, multiple) * multiple if block >= multiple else block


def num_blocks(length: int, block: int) -> int:
    """Blocks of a full shard; at least one, since a call sends a flag to everyone."""
    return max(1, ceil_div(length, block))


def block_of(first: int, end: int, block: int, index: int) -> tuple[int, int]:
    """First and end row of block `index` of the shard [first, end); empty where it is short."""
    return min(first + index * block, end), min(first + (index + 1) * block, end)


def growing(count: int, growth: int) -> Iterator[range]:
    """0..count-1 in groups of 1, growth, growth^2, ...: the first is ready early, the later GEMMs
    are few and large."""
    start, size = 0, 1
    while start < count:
        yield range(start, min(start + size, count))
        start, size = start + size, size * growth


# Of each arena: its second stream, and the events of fork and join.
_streams: WeakKeyDictionary[Arena, tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event]] = (
    WeakKeyDictionary()
)


class Lanes:
    """The current stream (lane 0) and the arena's second compute stream (lane 1).

    Without a second lane, and on CPU, both are the current stream. The order of a call is `fork`,
    work inside `use`, `join`.
    """

    def __init__(self, arena: Arena, *, two: bool) -> None:
        self._device = arena.device
        self._parts: tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event] | None = None
        if two and arena.device.type == "cuda":
            if arena not in _streams:
                stream = torch.cuda.Stream(arena.device)
                _streams[arena] = (stream, torch.cuda.Event(), torch.cuda.Event())
            self._parts = _streams[arena]

    def fork(self) -> None:
        """Lane 1 waits for everything that the current stream has queued so far."""
        if self._parts:
            stream, forked, _ = self._parts
            forked.record(torch.cuda.current_stream(self._device))
            stream.wait_event(forked)

    def use(self, index: int) -> AbstractContextManager[Any]:
        """Lane `index` modulo 2 is the current stream inside."""
        if self._parts and index % 2:
            return torch.cuda.stream(self._parts[0])
        return nullcontext()

    def join(self) -> None:
        """The current stream waits for lane 1."""
        if self._parts:
            stream, _, joined = self._parts
            joined.record(stream)
            torch.cuda.current_stream(self._device).wait_event(joined)


def send(
    arena: Arena, slot: Slot, peer: int, flag: int, data: Tensor | None, offset_bytes: int
) -> None:
    """By copy engine, on the current stream: `data` into the peer's slot, then its flag.

    data  contiguous; None or empty sends the flag alone
    """
    if data is not None and data.numel():
        slot.view(peer, data.shape, data.dtype, offset_bytes).copy_(data)
    slot.flags[peer][flag : flag + 1].copy_(arena.one)


def receive(arena: Arena, slot: Slot, flags: range, per_source: int, *, on_stream: bool) -> None:
    """The current stream waits for this rank's `flags`, those of its own left out, and clears them.

    per_source  flag i was set by rank i // per_source
    on_stream   by stream memory operations of the driver instead of a kernel of one program. Under
                capture (torch does not capture them either) and in debug mode (they know no
                deadline) it is the kernel all the same.

    Why there are two ways: the kernel needs a place on an SM, and beside a GEMM that fills the
    device it gets one only when that GEMM ends; what follows the wait on its lane starts no
    earlier. A stream's own wait needs no SM, so a copy behind it can run beside that GEMM.

    Every rank queues what it sends before it waits, so no wait is ahead of what a peer waits for,
    also where all streams share one queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
    """
    if on_stream and arena.device.type == "cuda" and not arena.deadline_ns:
        stream = torch.cuda.current_stream(arena.device)
        if not torch.cuda.is_current_stream_capturing():
            base = slot.flags[arena.rank].data_ptr()
            wanted = [flag for flag in flags if flag // per_source != arena.rank]
            _wait_on_stream(stream.cuda_stream, [base + 4 * flag for flag in wanted])
            return
    from megascale.flux.symmetric.launch import wait_flags

    wait_flags(arena, slot, flags, per_source=per_source)


@cache
def can_wait_on_stream() -> bool:
    """The bindings of the driver are installed. Asked before a call: one that fails in the middle
    would leave flags behind."""
    try:
        return find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


def _wait_on_stream(stream: int, addresses: list[int]) -> None:
    from cuda.bindings import driver

    equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
    results = [driver.cuStreamWaitValue32(stream, address, 1, equal)[0] for address in addresses]
    results += [driver.cuStreamWriteValue32(stream, address, 0, 0)[0] for address in addresses]
    assert not any(int(result) for result in results), (results, len(addresses))
