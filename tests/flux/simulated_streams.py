"""Streams, events and flags of several ranks in one process, run in any legal order.

What the forms queue on streams is not run when it is queued. Each rank's host program runs to its
end first, then a scheduler takes operations at random from the heads of all streams of all ranks,
as far as events and flags allow. A missing event, a wait that is too late, a buffer that is freed
or overwritten too early: in some order the values become wrong, or nothing can go on.

The arena is the real one with simulated memory, so its `side` and `join` are tried as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.flux.arena import NUM_SLOTS, Arena, Slot

_CPU = torch.device("cpu")
_DEFERRED = {"aten.mm.out", "aten.addmm.out", "aten.addmm_.default", "aten.copy_.default"}
_ALLOCATED = {"aten.new_empty.default", "aten.empty.memory_format"}


class Stream:
    """Operations in order: (may run, run). `done` counts those that have run."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.operations: list[tuple[Callable[[], bool], Callable[[], Any]]] = []
        self.done = 0

    def queue(self, run: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.operations.append((ready, run))

    def wait_event(self, event: Event) -> None:
        stream, position = event.mark
        self.queue(lambda: None, lambda: stream.done >= position)


class Event:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.mark: tuple[Stream, int] = (Stream(), 0)

    def record(self, stream: Stream) -> None:
        self.mark = (stream, len(stream.operations))


class Device:
    """The streams of all ranks, and the one that is current for the host program that runs now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[Stream] = []
        self.current = self.new_stream()
        self.temporaries: list[Tensor] = []
        self.flags: list[Tensor] = []
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def new_stream(self, *_args: Any, **_kwargs: Any) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

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


class Deferred(TorchDispatchMode):
    """Queues what writes into given memory; notes what is allocated; the rest (views) runs."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func) in _DEFERRED:
            self.device.current.queue(lambda: _run(func, args, kwargs))
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        if str(func) in _ALLOCATED:
            result.view(torch.uint8).fill_(0xFF)
            self.device.temporaries.append(result)
        elif isinstance(result, Tensor):
            shared = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            assert result.untyped_storage().data_ptr() in shared, f"{func} is not simulated"
        return result


def _run(func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    if args[0].dtype == torch.int32:
        assert not bool(args[0].any()), "a flag is set that has not been cleared"
    func(*args, **kwargs)


class SimulatedArena(Arena):
    """The arena of a rank over memory that all ranks of the process see."""

    def __init__(self, rank: int, slots: list[Slot], device: Device) -> None:
        self.rank, self.world_size = rank, slots[0].world_size
        self.device = torch.device("cuda", 0)
        self.deadline_ns = 0
        self.one = torch.ones(1, dtype=torch.int32)
        self.capacity = slots[0].data[0].numel()
        self.compute = device.new_stream()
        self._copies: Any = device.new_stream()
        self._fork: Any = Event()
        self._joined: Any = Event()
        self._slots = slots
        self._turn = 0

    @contextmanager
    def turn(self, num_bytes: int) -> Iterator[Slot]:
        assert num_bytes <= self.capacity, (num_bytes, self.capacity)
        self._turn += 1
        yield self._slots[self._turn % NUM_SLOTS]


def arenas(world_size: int, num_bytes: int, device: Device) -> list[SimulatedArena]:
    """Of all ranks; data holds NaN and flags are zero."""
    turns, ranks = range(NUM_SLOTS), range(world_size)
    data = [[torch.full((num_bytes,), 0xFF, dtype=torch.uint8) for _ in ranks] for _ in turns]
    flags = [[torch.zeros(4096, dtype=torch.int32) for _ in ranks] for _ in turns]
    device.flags = [t for turn in flags for t in turn]
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
        temporaries = device.temporaries[keep:]
        device.current.queue(lambda: [t.view(torch.uint8).fill_(0xFF) for t in temporaries])
    return result


def simulate_kernels(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Waits and sums as operations of the current stream."""
    from megascale.flux import lanes
    from megascale.flux.symmetric import launch

    def wait(flags: Sequence[Tensor]) -> None:
        def clear() -> None:
            for flag in flags:
                flag.zero_()

        device.current.queue(clear, lambda: all(bool(flag) for flag in flags))

    def wait_flags(arena: Arena, slot: Slot, indices: range, *, per_source: int = 1) -> None:
        own = slot.flags[arena.rank]
        wait([own[i : i + 1] for i in indices if i // per_source != arena.rank])

    def wait_on_stream(_stream: int, addresses: list[int]) -> None:
        wait([_flag_at(address, device.flags) for address in addresses])

    def sum_parts(
        out: Tensor, parts: Tensor, own: Tensor | None = None, rank: int = -1, bias: Any = None
    ) -> None:
        def run() -> None:
            terms = [own if s == rank and own is not None else p for s, p in enumerate(parts)]
            total = torch.stack(terms).sum(0)
            out.copy_(total if bias is None else total + bias)

        assert parts.shape[1:] == out.shape, (parts.shape, out.shape)
        device.current.queue(run)

    monkeypatch.setattr(Stream, "cuda_stream", 0, raising=False)
    monkeypatch.setattr(launch, "wait_flags", wait_flags)
    monkeypatch.setattr(launch, "sum_parts", sum_parts)
    monkeypatch.setattr(lanes, "_wait_on_stream", wait_on_stream)
    monkeypatch.setattr(lanes, "_streams", {})


def _flag_at(address: int, known: Sequence[Tensor]) -> Tensor:
    for flags in known:
        index = (address - flags.data_ptr()) // 4
        if 0 <= index < flags.numel():
            return flags[index : index + 1]
    raise AssertionError(f"{address} is no flag")
