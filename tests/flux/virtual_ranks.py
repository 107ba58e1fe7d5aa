"""Several ranks of a group on one GPU: the fused operators' protocols without a second device.

Every rank has a stream and its part of the SMs, so that the kernels of all ranks are resident at
once and really exchange tiles and flags through memory. A kernel that has more programs than its
arena has SMs may wait here for one that finds no place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megascale.flux.arena import NUM_FLAGS, NUM_SLOTS, Slot
from megascale.flux.arena import _counters as counters
from megascale.kernels.driver import driver

# Before CUDA starts: with the default of 8 hardware queues, streams of several ranks share one, and
# a kernel that waits for a peer stands in front of the peer's work.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class VirtualArena:
    """What forms use of an `Arena`, for one of several ranks on the current device."""

    group = None

    def __init__(self, rank: int, slots: list[Slot], num_sms: int, deadline_ns: int) -> None:
        self.rank, self.world_size = rank, slots[0].world_size
        self.device = slots[0].data[0].device
        self.num_sms, self.deadline_ns = num_sms, deadline_ns
        self.one = torch.ones(4096, dtype=torch.int32, device=self.device)
        self.capturing = False
        self.done = torch.zeros(64, dtype=torch.int32, device=self.device)
        self.report = torch.zeros(8, dtype=torch.int64, pin_memory=True)
        self.stream = torch.cuda.Stream()
        self._copies = torch.cuda.Stream()
        self.copy_stream = self._copies.cuda_stream
        self._slots, self._turn = slots, 0

    @contextmanager
    def turn(self, num_bytes: int) -> Iterator[Slot]:
        slot = self._slots[self._turn]
        assert num_bytes <= slot.data[0].numel(), (num_bytes, slot.data[0].numel())
        self._turn = (self._turn + 1) % NUM_SLOTS
        yield slot

    def fork(self) -> None:
        self._copies.wait_stream(torch.cuda.current_stream())

    def send(self, to: int, source: int, num_bytes: int, flag: int) -> None:
        if num_bytes:
            driver().copy(to, source, num_bytes, self._copies.cuda_stream)
        driver().write(flag, 1, self._copies.cuda_stream)

    def carry(
        self, made: Any, to: int, source: int, num_bytes: int, flags: int, count: int
    ) -> None:
        stream = self._copies.cuda_stream
        driver().take(made, stream)
        if num_bytes:
            driver().copy(to, source, num_bytes, stream)
        driver().copy(flags, self.one.data_ptr(), 4 * count, stream)

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._copies)


def virtual_arenas(world_size: int, capacity: int, deadline_s: float = 10.0) -> list[VirtualArena]:
    """An arena a rank; slots are poisoned with NaN."""
    device = torch.device("cuda")
    data = [
        [torch.full((capacity,), 255, dtype=torch.uint8, device=device) for _ in range(world_size)]
        for _ in range(NUM_SLOTS)
    ]
    flags = [
        [torch.zeros(NUM_FLAGS, dtype=torch.int32, device=device) for _ in range(world_size)]
        for _ in range(NUM_SLOTS)
    ]
    # On one device copies are kernels too: some SMs stay free for them.
    sms = torch.cuda.get_device_properties(device).multi_processor_count // world_size - 2
    arenas = []
    for rank in range(world_size):
        slots = [Slot(rank, d, f, device) for d, f in zip(data, flags, strict=True)]
        arenas.append(VirtualArena(rank, slots, sms, int(deadline_s * 1e9)))
    torch.cuda.synchronize()
    return arenas


def on_all(arenas: list[VirtualArena], call: Callable[[int, VirtualArena], Any]) -> list[Any]:
    """`call(rank, arena)` of every rank on its stream, all in flight at once; synchronised.

    Kernels should have been loaded before: loading one waits for those that run, and those may wait
    for the rank whose kernel is being loaded.
    """
    torch.cuda.synchronize()
    results = []
    for rank, arena in enumerate(arenas):
        with torch.cuda.stream(arena.stream):
            results.append(call(rank, arena))
    torch.cuda.synchronize()
    return results


def warm_up(arenas: list[VirtualArena], call: Callable[[int, VirtualArena], Any]) -> None:
    """Load every kernel of `call`: a rank after the other, all flags set, so that none waits.

    Whatever a peer announces is among the flags of some slot: a flag, or in band a word of the data
    in 2, 4 or 8 bytes (so both halves are set). Some counters (tickets, chunks) are waited for too,
    but what counts there are programs of the rank itself, all of which run: it is alone.

    Twice, since what a call finds remembered may take another way than the first.
    """
    flags = [f for slot in arenas[0]._slots for f in slot.flags]
    for rank, arena in enumerate(arenas):
        for _ in range(2):
            for flag in flags:
                flag.fill_(0x0001_0001)
            torch.cuda.synchronize()
            with torch.cuda.stream(arena.stream):
                call(rank, arena)
            torch.cuda.synchronize()
    for words in [*flags, *(words for arena in arenas for words in _counters_of(arena))]:
        words.zero_()
    for arena in arenas:
        arena._turn = 0
    torch.cuda.synchronize()


def flags_at_rest(arenas: list[VirtualArena]) -> bool:
    """Every flag and every counter is zero, as between calls."""
    flags = [f for slot in arenas[0]._slots for f in slot.flags]
    counters = [words for arena in arenas for words in _counters_of(arena)]
    return not any(bool(words.any()) for words in [*flags, *counters])


def _counters_of(arena: VirtualArena) -> list[torch.Tensor]:
    return [arena.done, arena.report, *counters.get(arena, {}).values()]
