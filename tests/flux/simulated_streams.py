"""Streams, events and flags of several ranks in one process, run in any legal order.

What the forms queue on streams is not run when it is queued. Each rank's host program runs to its
end first, then a scheduler takes operations at random from the heads of all streams of all ranks,
as far as events and flags allow. A missing event, a wait that is too late, a buffer that is freed
or overwritten too early: in some order the values become wrong, or nothing can go on.

The arena is the real one with simulated memory and turns, and the lanes are real, on a driver that
queues: its handles are numbers of streams and events, and its addresses those of CPU memory, looked
up before they are used. While `Device.capture` is set the driver refuses what cannot be captured.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.flux import arena as arena_module
from megascale.flux import lanes
from megascale.flux.arena import NUM_SLOTS, Arena, Slot
from megascale.flux.gemm_reduce_scatter import staging

_CPU = torch.device("cpu")
_DEFERRED = {"aten.mm.out", "aten.addmm.out", "aten.addmm_.default", "aten.copy_.default"}
_ALLOCATED = {"aten.new_empty.default", "aten.empty.memory_format"}


class Stream:
    """Operations in order: (may run, run). `done` counts those that have run."""

    device_index, device_type = 0, 1

    def __init__(self, number: int) -> None:
        self.cuda_stream = self.stream_id = number
        self.operations: list[tuple[Callable[[], bool], Callable[[], Any]]] = []
        self.done = 0

    def queue(self, run: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.operations.append((ready, run))

    def follow(self, mark: tuple[Stream, int]) -> None:
        stream, position = mark
        self.queue(lambda: None, lambda: stream.done >= position)


class Event:
    """`mark` is what its stream had queued when it was last recorded."""

    def __init__(self, number: int) -> None:
        self.cuda_event = number
        self.mark: tuple[Stream, int] = (Stream(-1), 0)

    def record(self, stream: Stream) -> None:
        self.mark = (stream, len(stream.operations))


class Device:
    """The streams of all ranks, the one that is current for the host program that runs now, and
    memory that addresses may point to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[Stream] = []
        self.events: list[Event] = []
        self.current = self.new_stream()
        self.capture: int | None = None
        self.temporaries: list[Tensor] = []
        self.memory: list[Tensor] = []
        self.flags: list[Tensor] = []
        self.calls: Counter[str] = Counter()  # of the driver, and of torch's operators
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "Event", self.new_event)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", self._current, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_setStream", self._set_current, raising=False)
        driver = Driver(self)
        for module in (arena_module, lanes, staging):
            monkeypatch.setattr(module, "driver", lambda: driver)
        for module in (arena_module, lanes):
            monkeypatch.setattr(module, "current_stream", lambda _: self.current.cuda_stream)

    @property
    def capturing(self) -> bool:
        return self.capture is not None

    def new_stream(self, *_args: Any, **_kwargs: Any) -> Stream:
        self.streams.append(Stream(len(self.streams)))
        return self.streams[-1]

    def new_event(self, *_args: Any, **_kwargs: Any) -> Event:
        self.events.append(Event(len(self.events)))
        return self.events[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _current(self, device_index: int) -> tuple[int, int, int]:
        return self.current.stream_id, device_index, self.current.device_type

    def _set_current(self, stream_id: int, device_index: int, device_type: int) -> None:
        assert (device_index, device_type) == (0, 1), (device_index, device_type)
        self.current = self.streams[stream_id]

    def flag_at(self, address: int) -> tuple[Tensor, int]:
        """Where a flag is: its words and the index among them."""
        for flags in self.flags:
            index, odd = divmod(address - flags.data_ptr(), 4)
            if not odd and 0 <= index < flags.numel():
                return flags, index
        raise AssertionError(f"{address} is no flag")

    def move(self, to: int, source: int, num_bytes: int) -> None:
        """Bytes between known memory; what goes into flags sets one that was cleared."""
        assert self._knows(source, num_bytes), f"{num_bytes} bytes from unknown memory"
        if not self._knows(to, num_bytes):
            flags, index = self.flag_at(to)
            count = num_bytes // 4
            assert index + count <= flags.numel(), (index, count)
            assert not flags[index : index + count].any(), "a flag is set that was not cleared"
        ctypes.memmove(to, source, num_bytes)

    def _knows(self, address: int, num_bytes: int) -> bool:
        return any(
            m.data_ptr() <= address and address + num_bytes <= m.data_ptr() + m.nbytes
            for m in self.memory
        )

    def run(self, seed: int) -> None:
        """Everything queued, in an order of its own for each seed."""
        chance = random.Random(seed)
        # Streams of unequal speed, or all would advance together.
        speed = [chance.random() ** 2 + 0.01 for _ in self.streams]
        while any(s.done < len(s.operations) for s in self.streams):
            heads = [
                (stream, weight)
                for stream, weight in zip(self.streams, speed, strict=True)
                if stream.done < len(stream.operations) and stream.operations[stream.done][0]()
            ]
            assert heads, "no stream can go on"
            stream = chance.choices([s for s, _ in heads], [w for _, w in heads])[0]
            stream.operations[stream.done][1]()
            stream.done += 1


class Driver:
    """What the arena and the lanes use of `megascale.kernels.driver`: it queues."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._stream(stream, "copy").queue(lambda: self._device.move(to, source, num_bytes))

    def write(self, address: int, value: int, stream: int) -> None:
        assert self._device.capture is None, "a stream's write is not captured"
        flags, index = self._device.flag_at(address)

        def run() -> None:
            assert int(flags[index]) != value, f"a flag is {value} already"
            flags[index] = value

        self._stream(stream, "write").queue(run)

    def wait(self, address: int, value: int, stream: int) -> None:
        assert self._device.capture is None, "a stream's wait is not captured"
        flags, index = self._device.flag_at(address)
        self._stream(stream, "wait").queue(lambda: None, lambda: int(flags[index]) == value)

    def taking(self, words: Sequence[tuple[int, int]]) -> list[tuple[Tensor, int, int]]:
        return [(*self._device.flag_at(address), value) for address, value in words]

    def take(self, words: list[tuple[Tensor, int, int]], stream: int) -> None:
        assert self._device.capture is None, "a stream's wait is not captured"

        def come() -> bool:
            return all(int(flags[index]) == value for flags, index, value in words)

        def clear() -> None:
            for flags, index, _ in words:
                flags[index] = 0

        self._stream(stream, "take").queue(clear, come)

    def record(self, event: int, stream: int) -> None:
        self._device.events[event].record(self._stream(stream, "record"))

    def follow(self, stream: int, event: int) -> None:
        self._stream(stream, "follow").follow(self._device.events[event].mark)

    def _stream(self, number: int, what: str) -> Stream:
        self._device.calls[what] += 1
        return self._device.streams[number]


class Deferred(TorchDispatchMode):
    """Queues what writes into given memory; notes what is allocated; the rest (views) runs."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.device.calls[str(func)] += 1
        if str(func) in _DEFERRED:
            self.device.current.queue(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        if str(func) in _ALLOCATED:
            result.view(torch.uint8).fill_(0xFF)
            self.device.temporaries.append(result)
            self.device.memory.append(result)
        elif isinstance(result, Tensor):
            shared = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            assert result.untyped_storage().data_ptr() in shared, f"{func} is not simulated"
        return result


class SimulatedArena(Arena):
    """The arena of a rank over memory that all ranks of the process see."""

    def __init__(self, rank: int, slots: list[Slot], device: Device) -> None:
        self.rank, self.world_size = rank, slots[0].world_size
        self.device = torch.device("cuda", 0)
        self.deadline_ns = 0
        self.one = torch.ones(4096, dtype=torch.int32)
        self.capacity = slots[0].data[0].numel()
        self.compute = device.new_stream()
        self._copies_handle = device.new_stream().cuda_stream
        self._fork_handle = device.new_event().cuda_event
        self._joined_handle = device.new_event().cuda_event
        self._device_index = 0
        self._slots, self._turn = slots, 0
        self._simulated = device
        device.memory.append(self.one)

    @contextmanager
    def turn(self, num_bytes: int) -> Iterator[Slot]:
        assert num_bytes <= self.capacity, (num_bytes, self.capacity)
        self._capture = self._simulated.capture
        self._turn += 1
        yield self._slots[self._turn % NUM_SLOTS]


def arenas(world_size: int, num_bytes: int, device: Device) -> list[SimulatedArena]:
    """Of all ranks; data holds NaN and flags are zero."""
    turns, ranks = range(NUM_SLOTS), range(world_size)
    data = [[torch.full((num_bytes,), 0xFF, dtype=torch.uint8) for _ in ranks] for _ in turns]
    flags = [[torch.zeros(4096, dtype=torch.int32) for _ in ranks] for _ in turns]
    device.flags = [t for turn in flags for t in turn]
    device.memory += [t for turn in data for t in turn]
    return [
        SimulatedArena(rank, [Slot(rank, data[t], flags[t], _CPU) for t in turns], device)
        for rank in ranks
    ]


def call(arena: SimulatedArena, device: Device, form: Callable[[], Any], keep: int) -> Any:
    """Queue a call of a rank. Its temporaries are overwritten where their memory could be reused:
    after the call, on the stream that allocated them. The first `keep` allocations are its result.
    """
    device.temporaries = []
    with device.stream(arena.compute):
        with Deferred(device):
            result = form()
        assert device.current is arena.compute, "another stream was left current"
        temporaries = device.temporaries[keep:]
        device.current.queue(lambda: [t.view(torch.uint8).fill_(0xFF) for t in temporaries])
    return result


def simulate_kernels(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Waits and sums as operations of the current stream."""
    from megascale.flux.symmetric import launch

    def waiting(
        arena: Arena, slot: Slot, indices: range, *, per_source: int = 1, skip_own: bool = True
    ) -> Callable[[], None]:
        assert skip_own
        own = slot.flags[arena.rank]
        flags = [own[i : i + 1] for i in indices if i // per_source != arena.rank]

        def clear() -> None:
            for flag in flags:
                flag.zero_()

        return lambda: device.current.queue(clear, lambda: all(bool(flag) for flag in flags))

    def summing(
        out: Tensor, parts: Tensor, own: Tensor | None = None, rank: int = -1, bias: Any = None
    ) -> Callable[[], None]:
        def run() -> None:
            terms = [own if s == rank and own is not None else p for s, p in enumerate(parts)]
            total = torch.stack(terms).sum(0)
            out.copy_(total if bias is None else total + bias)

        assert parts.shape[1:] == out.shape, (parts.shape, out.shape)
        return lambda: device.current.queue(run)

    monkeypatch.setattr(launch, "waiting", waiting)
    monkeypatch.setattr(launch, "summing", summing)
