"""Symmetric memory of one tensor-parallel group, shared by all its fused operators.

Every rank allocates the same bytes and maps those of all others (PyTorch symmetric memory, CUDA
backend, no multicast), so that a copy engine or a kernel writes into a peer's memory through an
ordinary address. The memory is four slots of data and flags; calls take turns through them.

**Why there is no barrier, no epoch and no reset pass.** All calls of a group take turns 0, 1, 2, 3,
0, ... in the same order on all ranks, and every call is an all-to-all dependency:
  (a) it completes on a rank only after every peer has begun it (it waits for a flag of each);
  (b) a rank begins call i + 1 only after its own call i (order of the stream).
When rank r begins call i + 2 it has completed i + 1, so every peer has begun i + 1, so every peer
has completed i: two slots would do. Two allowances cost a slot each. What call i received may be
read until the next call but one begins, which is what a weight gradient beside its input gradient
needs. And an all-gather may be started, waited for only after the call that follows it, so that (b)
holds one call later. (tests/flux/turns.py searches all interleavings, and finds the fault with one
slot fewer.) The same holds for flags: whoever waited for one puts it back to 0.

CUDA graphs: a captured sequence has its turns baked in, and how often it is replayed is not known
here. So the first call of a capture begins with a barrier on the device, and once anything has been
captured every eager call does too (about 5 us, in programs that mix the two).

Memory: 4 x the largest call + 16 MB. Growth is collective and synchronises; `reserve` up front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.kernels.driver import current_stream, driver

NUM_SLOTS = 4
# Words of a slot. As flags, one a source and tile: m n / 32768 with tiles of 128 x 256. As data in
# band (`symmetric/kernel.py`), 4 MB: 128 rows of 12,288 columns from one peer.
NUM_FLAGS = 1 << 20
_GRANULE = 2 << 20  # bytes; what the driver maps at least
_ONES = 4096
_COUNT_WORDS = 1024  # of the barrier; a rank each

_arenas: dict[str, Arena] = {}
_counters: WeakKeyDictionary[Any, dict[str, Tensor]] = WeakKeyDictionary()  # of an arena, by form


class Slot:
    """The memory of one turn, of all ranks.

    data    uint8 [capacity] of every rank; data[rank] is the own one
    flags   int32 [NUM_FLAGS] of every rank; all zero between calls
    data_ptrs, flag_ptrs   int64 [W] on the device: their addresses, for kernels
    """

    def __init__(
        self, rank: int, data: Sequence[Tensor], flags: Sequence[Tensor], device: torch.device
    ) -> None:
        self.rank = rank
        self.world_size = len(data)
        self.data = tuple(data)
        self.flags = tuple(flags)
        self.data_ptrs = torch.tensor([t.data_ptr() for t in data], device=device)
        self.flag_ptrs = torch.tensor([t.data_ptr() for t in flags], device=device)

    def view(
        self, owner: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """The first elements of `owner`'s data as a contiguous tensor of this shape."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        return self.data[owner][offset_bytes : offset_bytes + count].view(dtype).view(*shape)


class Arena:
    """The slots of a group and the copy stream beside them. One a group: `Arena.of`.

    one       int32 [4096], all 1: source of flags that a copy engine sets
    done      int32 [64], zero: counters of programs that finished; who counts puts them back
    report    int64 [8] of host memory: (1, source rank, tile) of a wait that ran out of time
    deadline_ns   of every wait in a kernel; 0 is none (debug mode sets it)
    reserved_sms  SMs that persistent kernels leave to others (NCCL)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = group.size()
        self.device = device
        self.deadline_ns = 0
        self.reserved_sms = 0
        self.one = torch.ones(_ONES, dtype=torch.int32, device=device)
        self.done = torch.zeros(64, dtype=torch.int32, device=device)
        self.report = torch.zeros(8, dtype=torch.int64, pin_memory=True)
        self.capacity = 0
        self._device_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._copies = torch.cuda.Stream(device, priority=-1)
        self._device_index = self.one.device.index
        self._fork, self._joined, self._chained = _made_event(), _made_event(), _made_event()
        self._copies_handle = self._copies.cuda_stream
        self._fork_handle, self._joined_handle = self._fork.cuda_event, self._joined.cuda_event
        self._slots: list[Slot] = []
        self._counts: Tensor | None = None
        self._words: list[Tensor] = []  # of this rank: what is zero between calls
        self._memory: Any = None
        self._retired: list[Any] = []  # memory whose addresses captured graphs hold
        self._outgrown: Any = None  # memory that the call before may still be read from
        self._outgrown_turns = 0
        self._turn = 0
        self._stream: int | None = None  # of the last call
        self._capture: int | None = None  # the running capture that has begun with a barrier
        self._mixed = False  # something was captured: eager calls begin with a barrier
        self._allocate(_GRANULE)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Arena:
        """The arena of this group; made at first use, which is collective over the group."""
        found = _arenas.get(group.group_name)
        if found is None or found.group is not group:
            found = _arenas[group.group_name] = cls(group, device)
        return found

    @property
    def num_sms(self) -> int:
        """SMs that a persistent kernel of the group may fill."""
        return self._device_sms - self.reserved_sms

    @contextmanager
    def turn(self, num_bytes: int) -> Iterator[Slot]:
        """The next slot, of at least `num_bytes` on every rank.

        All ranks call with the same size in the same order. Raises FluxError where it would have to
        grow while a graph is captured.
        """
        self._begin(num_bytes)
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % NUM_SLOTS
        yield slot

    def _begin(self, num_bytes: int) -> None:
        stream = current_stream(self._device_index)
        capture = _capture_id(stream)
        if num_bytes > self.capacity:
            if capture is not None:
                raise FluxError(
                    f"this call needs {num_bytes} bytes of symmetric memory, there are "
                    f"{self.capacity}, and none can be added while a graph is captured; call it "
                    "once before the capture, or reserve()"
                )
            self.reserve(num_bytes)
        elif self._outgrown is not None and capture is None:  # freeing synchronises
            self._outgrown_turns -= 1
            if self._outgrown_turns == 0:
                self._outgrown = None
        if self._stream is not None and stream != self._stream and capture in (None, self._capture):
            driver().record(self._chained.cuda_event, self._stream)
            driver().follow(stream, self._chained.cuda_event)
        self._stream = stream
        if capture is not None and capture != self._capture:
            self._mixed = True
            self.barrier()
        elif capture is None and self._mixed:
            self.barrier()
        self._capture = capture

    def fork(self) -> None:
        """The copy stream comes after everything that the current stream has queued so far."""
        driver().record(self._fork_handle, current_stream(self._device_index))
        driver().follow(self._copies_handle, self._fork_handle)

    def send(self, to: int, source: int, num_bytes: int, flag: int) -> None:
        """On the copy stream, by copy engine: bytes to a peer's address, then its flag.

        The flag follows the data also where there is none. Eagerly it is written by the stream, in
        a capture by a copy: capturing knows no writes.
        """
        if num_bytes:
            driver().copy(to, source, num_bytes, self._copies_handle)
        if self._capture is None:
            driver().write(flag, 1, self._copies_handle)
        else:
            driver().copy(flag, self.one.data_ptr(), 4, self._copies_handle)

    def carry(
        self, made: Any, to: int, source: int, num_bytes: int, flags: int, count: int
    ) -> None:
        """On the copy stream, not in a capture: when the words `made` (`Driver.taking`) have come,
        bytes travel to a peer's address by copy engine, and `count` flags there are set.

        Flags are copied too: a memset of many may be a kernel, which finds no place beside a grid
        that fills the device.
        """
        driver().take(made, self._copies_handle)
        if num_bytes:
            driver().copy(to, source, num_bytes, self._copies_handle)
        for first in range(0, count, _ONES):
            num = min(count - first, _ONES)
            driver().copy(flags + 4 * first, self.one.data_ptr(), 4 * num, self._copies_handle)

    @property
    def copy_stream(self) -> int:
        """The stream of `send` and `carry`. From torch's pool: a program may have got it too."""
        return self._copies_handle

    @property
    def capturing(self) -> bool:
        """The call that has its turn is being captured into a graph."""
        return self._capture is not None

    def join(self) -> None:
        """The current stream waits for the copy stream."""
        driver().record(self._joined_handle, self._copies_handle)
        driver().follow(current_stream(self._device_index), self._joined_handle)

    def barrier(self) -> None:
        """All ranks have come here: one small kernel on the current stream."""
        from megascale.flux.signals import barrier_kernel
        from megascale.kernels.kernel_call import launch

        launch(
            barrier_kernel,
            1,
            {"count_ptrs": self._counts, "report_ptr": self.report, "rank": self.rank},
            {"WORLD": self.world_size, "DEADLINE_NS": self.deadline_ns, "num_warps": 1},
        )

    def reserve(self, num_bytes: int) -> None:
        """Grow so that a call of `num_bytes` fits. Collective; every rank asks for the same."""
        if num_bytes > self.capacity:
            self._allocate(-(-num_bytes // _GRANULE) * _GRANULE)

    def reset(self) -> None:
        """Flags, counters, report and turn as in a new arena. Collective.

        For what a call has left that not all ranks could make (a candidate of the tuner that was
        excluded): a later call would take it for its own. No call may be pending, and no gather
        that was started. Graphs that were captured may be replayed afterwards.
        """
        self._quiesce()
        for words in (*self._words, self.done, self.report, *_counters.get(self, {}).values()):
            words.zero_()
        self._turn = 0
        self._stream = self._capture = None
        self._quiesce()  # nobody sets a flag that its owner then zeroes

    def _allocate(self, capacity: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._quiesce()
        if self._mixed:
            self._retired.append((self._memory, self._slots, self._counts))
        self._outgrown, self._outgrown_turns = (self._memory, self._slots), 2
        header = _COUNT_WORDS + NUM_SLOTS * NUM_FLAGS  # words
        memory = symm_mem.empty(
            header * 4 + NUM_SLOTS * capacity, dtype=torch.uint8, device=self.device
        )
        handle = symm_mem.rendezvous(memory, self.group)
        memory.zero_()
        self._quiesce()  # nobody sets a flag that its owner then zeroes
        words = [handle.get_buffer(r, (header,), torch.int32) for r in range(self.world_size)]
        self._counts = torch.tensor([w.data_ptr() for w in words], device=self.device)
        self._words = [words[self.rank]]
        self._slots = []
        for slot in range(NUM_SLOTS):
            first = _COUNT_WORDS + slot * NUM_FLAGS
            start = header * 4 + slot * capacity
            data = [
                handle.get_buffer(r, (capacity,), torch.uint8, start)
                for r in range(self.world_size)
            ]
            flags = [w[first : first + NUM_FLAGS] for w in words]
            self._slots.append(Slot(self.rank, data, flags, self.device))
        self._memory = (memory, handle)
        self.capacity = capacity
        self._turn = 0
        self._exchange()

    def _exchange(self) -> None:
        """Every rank writes its number into all peers and finds theirs: the mapping is right."""
        for slot in self._slots:
            for peer in range(self.world_size):
                slot.data[peer].view(torch.int32)[self.rank] = 1000 + self.rank
        self._quiesce()
        wanted = [1000 + r for r in range(self.world_size)]
        found = [
            s.data[self.rank].view(torch.int32)[: self.world_size].tolist() for s in self._slots
        ]
        self._quiesce()
        if any(numbers != wanted for numbers in found):
            raise FluxError(
                f"symmetric memory of rank {self.rank} holds {found} where ranks "
                f"0..{self.world_size - 1} wrote {wanted}: peers are mapped wrongly; use "
                'mode "reference" on this machine'
            )

    def _quiesce(self) -> None:
        """Every rank's device is idle and every host has come here."""
        torch.cuda.synchronize(self.device)
        token = torch.zeros(1, device=self.device)
        dist.all_reduce(token, group=self.group)
        torch.cuda.synchronize(self.device)


def zeros_of(arena: Any, what: str, count: int) -> Tensor:
    """int32 [count] of this rank, zero between calls: what kernels of a form count. They put it
    back themselves, and `Arena.reset` does.

    arena  or what stands for one
    Raises FluxError at a first call inside a capture, where they would belong to the graph.
    """
    found = _counters.setdefault(arena, {})
    if what not in found:
        if arena.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise FluxError(
                f"{what} are allocated at the first call of a form, and this one is inside a "
                "capture; call it once before"
            )
        found[what] = torch.zeros(count, dtype=torch.int32, device=arena.one.device)
    return found[what]


def _made_event() -> torch.cuda.Event:
    """An event that has a handle: torch makes it at the first record."""
    event = torch.cuda.Event()
    event.record()
    return event


def _capture_id(stream: int) -> int | None:
    """Which capture the stream belongs to, if any."""
    if not torch.cuda.is_current_stream_capturing():
        return None
    from cuda.bindings import runtime

    _, _, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    return int(number)
