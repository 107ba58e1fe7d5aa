"""What the chunked forms share: cutting and grouping of blocks, two lanes of GEMMs, waits, sends.

A chunked operator has up to three streams. The current stream and, where asked for, a second one
(the *lanes*) hold GEMMs, so that the last wave of one GEMM, which fills only a part of the device,
runs beside the first wave of the next. The arena's copy stream holds transfers, which use copy
engines and no SM. Every fork and join is an event: a call can be captured into a graph. Everything
is joined before a form returns, so temporaries of the current stream need no `record_stream`.

**Host time** is what these forms lose by: a call that took 350 to 1000 us of it (2x H200 host) won
nothing where the GPU needs less. So what a slot and a problem determine, addresses and views, is
made once (`remembered`); streams and events are used by the driver's handles; and torch is called
for GEMMs and for outputs alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from megascale.flux.tiles import ceil_div
from megascale.kernels.driver import current_stream, driver
from megascale.kernels.remembered import RememberedOf

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot

_ROWS = 128  # rows of a block are a multiple of a GEMM tile's where there are enough


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


class Send(NamedTuple):
    """By copy engine: `num_bytes` from `offset` of what is sent to address `to`, then the flag."""

    to: int
    offset: int
    num_bytes: int
    flag: int


def push(arena: Arena, sends: Iterable[Send], source: int) -> None:
    """On the copy stream, after what the current stream has queued so far. `source`: an address."""
    arena.fork()
    for to, offset, num_bytes, flag in sends:
        arena.send(to, source + offset, num_bytes, flag)


class Arrival:
    """`flags` of this rank that work waits for, those that would be its own left out.

    per_source  flag i is set by rank i // per_source
    """

    def __init__(self, slot: Slot, flags: range, per_source: int) -> None:
        self.flags, self.per_source = flags, per_source
        base = slot.flags[slot.rank].data_ptr()
        self.addresses = [base + 4 * i for i in flags if i // per_source != slot.rank]
        self.loaded: set[int] = set()  # deadlines for which the kernel that waits is there


class Lanes:
    """The current stream (lane 0) and, with `two`, the arena's second compute stream (lane 1).

    Lane i is lane i modulo 2; without a second one, and on CPU, all are the current stream. The
    order of a call is `load`, what is sent, `fork`, work inside `use`, `join`.
    """

    def __init__(self, arena: Arena, *, two: bool) -> None:
        self._arena = arena
        self._on_cuda = arena.device.type == "cuda"
        self._side: _Side | None = None
        handle = current_stream(arena.one.device.index) if self._on_cuda else 0
        self._handles = (handle, handle)
        if two and self._on_cuda:
            self._side = _sides.get(arena) or _sides.setdefault(arena, _Side(arena.device))
            self._handles = (handle, self._side.handle)
        self._by_kernel = (
            not self._on_cuda or arena.deadline_ns > 0 or torch.cuda.is_current_stream_capturing()
        )

    def load(self, arrivals: Iterable[Arrival], slot: Slot) -> None:
        """The kernels that `receive` may launch are compiled and loaded. Before anything is sent:
        one that fails has then left nothing in the slots of peers. A capture finds them, too."""
        deadline_ns = self._arena.deadline_ns
        for arrival in arrivals:
            if deadline_ns not in arrival.loaded:
                from megascale.flux.symmetric.launch import waiting

                waiting(self._arena, slot, arrival.flags, per_source=arrival.per_source)
                arrival.loaded.add(deadline_ns)

    def fork(self) -> None:
        """Lane 1 waits for everything that the current stream has queued so far."""
        if self._side:
            driver().record(self._side.forked, self._handles[0])
            driver().follow(self._side.handle, self._side.forked)

    def use(self, index: int) -> AbstractContextManager[Any]:
        """Lane `index` is the current stream inside."""
        return self._side if self._side and index % 2 else _CURRENT

    def join(self) -> None:
        """The current stream waits for lane 1."""
        if self._side:
            driver().record(self._side.joined, self._side.handle)
            driver().follow(self._handles[0], self._side.joined)

    def copy(self, index: int, to: int, source: int, num_bytes: int) -> None:
        """Bytes within this rank's memory, on lane `index`."""
        if not self._on_cuda:
            ctypes.memmove(to, source, num_bytes)
        elif num_bytes:
            driver().copy(to, source, num_bytes, self._handles[index % 2])

    def receive(self, index: int, arrival: Arrival, slot: Slot) -> None:
        """Lane `index`, in use, waits for flags and clears them.

        By the stream itself, which needs no SM: a wait in a kernel gets its place beside a GEMM
        that fills the device only when that ends, and what follows it starts no earlier. Where the
        driver cannot, by a kernel of one program that spins: under capture, and in debug mode,
        since the stream knows no deadline.

        Every rank queues what it sends before it waits, so no wait is ahead of what a peer waits
        for, also where all streams share one queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
        """
        if self._by_kernel:
            from megascale.flux.symmetric.launch import wait_flags

            wait_flags(self._arena, slot, arrival.flags, per_source=arrival.per_source)
            return
        stream = self._handles[index % 2]
        for address in arrival.addresses:
            driver().wait(address, 1, stream)
        for address in arrival.addresses:
            driver().write(address, 0, stream)


class _Side:
    """A second stream and the events of fork and join. As a context: it is the current stream.

    torch.cuda.stream does the same in 15 us of host time instead of 2, most of it in objects for
    the stream before.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream = torch.cuda.Stream(device)
        self._numbers = (stream.stream_id, stream.device_index, stream.device_type)
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        for event in self._events:
            event.record(stream)  # torch makes the event now
        self.handle: int = stream.cuda_stream
        self.forked, self.joined = [int(event.cuda_event) for event in self._events]
        self._before = self._numbers

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._numbers[1])
        _make_current(*self._numbers)

    def __exit__(self, *_: object) -> None:
        _make_current(*self._before)


def _make_current(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


_CURRENT = nullcontext()
_sides: WeakKeyDictionary[Arena, _Side] = WeakKeyDictionary()

_plans = RememberedOf(256)  # of a slot
remembered = _plans.get
"""(slot, key, make): what `make` gave for them, which may refer to the slot's memory alone."""

_F = TypeVar("_F", bound=Callable[..., Any])


def without_grad(form: _F) -> _F:
    """torch.no_grad for a function that is mostly called without it, at a fifth of its cost."""

    @wraps(form)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return form(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return form(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return call  # type: ignore[return-value]
