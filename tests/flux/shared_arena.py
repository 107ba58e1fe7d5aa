"""An arena over files that processes share, so that kernels and forms run on gloo ranks of a CPU.

Same interface and turns as `megascale.flux.arena.Arena`. Copies happen at once (`fork` and `join`
do nothing), so it shows what is wrong with addresses, flags and turns, and not with streams.

It is stricter than the real one. At the beginning of call i the slot of call i - 2 is free: its
data is overwritten with NaN bytes (what reads too long finds them), and its flags must be zero
(whoever waited for one has reset it). With `jitter_s` ranks sleep at the beginning and the end of
turns.

Kernels run under Triton's interpreter, which runs the programs of a grid one after another. So
`num_sms` is 1 by default: with more, a program would wait for one that begins after its end.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.arena import NUM_FLAGS, NUM_SLOTS, Arena, Slot

POISON = 0xFF  # a NaN in every floating-point type
PAUSE_S = 1e-3  # between two looks at a flag that is not set


class SharedArena(Arena):
    """Collective over `group`. `num_bytes`: capacity of a slot at first; it grows like the real."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int = 1 << 16,
        *,
        num_sms: int = 1,
        jitter_s: float = 0.0,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = group.size()
        self.device = torch.device("cpu")
        self.deadline_ns = 0
        self.reserved_sms = 0
        self.one = torch.ones(1, dtype=torch.int32)
        self.done = torch.zeros(64, dtype=torch.int32)
        self.report = torch.zeros(8, dtype=torch.int64)
        self.capacity = 0
        self.turns = 0  # calls so far
        self._num_sms = num_sms
        self._jitter_s = jitter_s
        self._random = random.Random(self.rank)
        self._slots = []
        self.reserve(num_bytes)

    @property
    def num_sms(self) -> int:
        return self._num_sms

    @contextmanager
    def turn(self, num_bytes: int) -> Iterator[Slot]:
        self._sleep()
        self.reserve(num_bytes)
        slot = self._slots[self.turns % NUM_SLOTS]
        self._retire(self._slots[(self.turns - 2) % NUM_SLOTS])
        self.turns += 1
        yield slot
        self._sleep()

    def _retire(self, slot: Slot) -> None:
        """The slot of the last call but one. Peers write into it from their next call on, and they
        begin that after this rank has begun the present one."""
        left = slot.flags[self.rank].nonzero().flatten().tolist()
        assert not left, f"rank {self.rank}, call {self.turns}: flags {left[:10]} were not reset"
        slot.data[self.rank].fill_(POISON)

    def _sleep(self) -> None:
        if self._jitter_s:
            time.sleep(self._random.random() * self._jitter_s)

    def fork(self) -> None:
        pass

    def send(self, to: int, source: int, num_bytes: int, flag: int) -> None:
        ctypes.memmove(to, source, num_bytes)
        ctypes.c_int32.from_address(flag).value = 1

    def join(self) -> None:
        pass

    def barrier(self) -> None:
        dist.barrier(self.group)

    def reset(self) -> None:
        super().reset()
        self.turns += -self.turns % NUM_SLOTS  # turns begin again at slot 0

    def _quiesce(self) -> None:
        dist.barrier(self.group)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes <= self.capacity:
            return
        dist.barrier(self.group)  # nobody uses the old memory
        self.capacity = -(-num_bytes // 4096) * 4096
        folders = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folders, group_src=0, group=self.group)
        folder = Path(str(folders[0]))
        ranks, turns = range(self.world_size), range(NUM_SLOTS)
        flags = [
            [_mapped(folder / f"flags{turn}_{rank}", NUM_FLAGS, torch.int32) for rank in ranks]
            for turn in turns
        ]
        data = [
            [_mapped(folder / f"data{turn}_{rank}", self.capacity, torch.uint8) for rank in ranks]
            for turn in turns
        ]
        for slot in data:
            slot[self.rank].fill_(POISON)
        dist.barrier(self.group)
        if self.rank == 0:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        self._slots = [Slot(self.rank, data[t], flags[t], self.device) for t in turns]
        self._words = [slot.flags[self.rank] for slot in self._slots]
        self.turns += -self.turns % NUM_SLOTS  # turns begin again at slot 0


def _mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """A file of zeros. A storage of its own for each rank and turn: the interpreter works on whole
    storages."""
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)


def interpret_kernels() -> None:
    """Call in a rank before it imports a module with kernels: Triton interprets them from here on.

    Ranks are forked with triton imported and set to compile, so it is imported anew. The
    interpreter copies every tensor argument back over itself after a launch, which would undo what
    a peer wrote in between; it must not.
    """
    early = [
        n for n, m in sys.modules.items() if n.startswith("megascale") and hasattr(m, "triton")
    ]
    assert not early, f"{early} were imported before the interpreter was asked for"
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    from triton.runtime import interpreter

    interpreter.GridExecutor._restore_args_dev = lambda *_args: None
    _give_way_in_waits(interpreter.InterpreterBuilder)
    _patch_the_language_once(interpreter)


def _give_way_in_waits(builder: Any) -> None:
    """A rank that finds a flag or a word unset sleeps before it looks again: there are more ranks
    than cores, and who spins takes the core of those it waits for."""
    atomic, load = builder.create_atomic_rmw, builder.create_masked_load

    def create_atomic_rmw(self: Any, operation: Any, ptr: Any, value: Any, *rest: Any) -> Any:
        found = atomic(self, operation, ptr, value, *rest)
        if not value.data.any() and not found.data.all():  # `read_flag` adds zero
            time.sleep(PAUSE_S)
        return found

    def create_masked_load(
        self: Any,
        ptrs: Any,
        mask: Any,
        other: Any,
        cache_modifier: Any,
        eviction_policy: Any,
        is_volatile: bool,
    ) -> Any:
        found = load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)
        if is_volatile and not found.data.all():  # words in band
            time.sleep(PAUSE_S)
        return found

    builder.create_atomic_rmw, builder.create_masked_load = create_atomic_rmw, create_masked_load


def _patch_the_language_once(interpreter: Any) -> None:
    """Triton replaces the functions of its language before every launch and in every call of a
    device function, which is half of the interpreter's time, and puts them back after a launch.
    Here once a module is enough: a rank that interprets never compiles."""
    patch, done = interpreter._patch_lang, set()

    def patch_lang(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in done:
            done.add(module)
            patch(function)
        return interpreter._LangPatchScope()  # nothing to put back

    interpreter._patch_lang = patch_lang
