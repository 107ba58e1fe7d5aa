"""What a call has left that not all ranks could make is cleared away: `Arena.reset`, the tuner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.arena import NUM_SLOTS, Arena, zeros_of
from megascale.flux.problem import Problem
from megascale.flux.timing import Probe
from megascale.flux.tuner import Candidate, Tuner
from megascale.flux.tuning_cache import Key, TuningCache
from tests.distributed import run_ranks
from tests.flux.shared_arena import SharedArena, interpret_kernels

pytestmark = [pytest.mark.full, pytest.mark.timeout(60)]

ROWS, COLUMNS = 6, 40


def _arena() -> SharedArena:
    interpret_kernels()
    assert dist.group.WORLD is not None
    return SharedArena(dist.group.WORLD, 1 << 14)


def _half_a_call(arena: SharedArena) -> None:
    """What rank 0 does of a call that its peers do not make: a turn, words and counters."""
    with arena.turn(64) as slot:
        for peer in range(arena.world_size):
            slot.flags[peer][:64] = 1
            slot.data[peer][:64] = 7
    arena.done[3] = 1
    arena.report[0] = 1
    zeros_of(arena, "tickets", 16)[2] = 5


def _sums(arena: SharedArena, count: int) -> None:
    """Calls that are wrong, or never end, if a word is left or ranks are not in the same turn."""
    from megascale.flux.symmetric.all_reduce import all_reduce
    from megascale.flux.symmetric.config import Sums

    for call in range(count):
        parts = [torch.full((ROWS, COLUMNS), float(call + 10 * r)) for r in range(arena.world_size)]
        y = all_reduce(parts[arena.rank], arena, config=Sums(in_band=call % 2 == 0))
        assert torch.equal(y, torch.stack(parts).sum(0)), call


def _reset(rank: int, world_size: int) -> list[int]:
    arena = _arena()
    _sums(arena, 3)
    if rank == 0:
        _half_a_call(arena)
    dist.barrier()
    arena.reset()
    left = sum(int(slot.flags[rank].count_nonzero()) for slot in arena._slots)
    counters = zeros_of(arena, "tickets", 16)
    found = [left, arena.turns % NUM_SLOTS, *map(int, (arena.done.sum(), counters.sum()))]
    dist.barrier()  # all have counted before anybody sends
    _sums(arena, 5)
    return [*found, int(arena.report[0])]


def test_ranks_go_on_together_after_a_call_that_one_of_them_made() -> None:
    assert run_ranks(_reset, 3) == [[0, 0, 0, 0, 0]] * 3


class _Turns(Arena):
    """A rank's turns alone."""

    def __init__(self, slots: Sequence[Any]) -> None:
        self._slots, self._words, self._turn = list(slots), [], 0
        self.done, self.report = torch.zeros(64), torch.zeros(8)

    def _begin(self, _num_bytes: int) -> None:
        """There is room, and one stream."""

    def _quiesce(self) -> None:
        """Nobody else."""


def test_after_a_reset_all_ranks_take_the_first_turn() -> None:
    arena = _Turns(range(NUM_SLOTS))

    def turns(count: int) -> list[Any]:
        return [arena.turn(0).__enter__() for _ in range(count)]

    assert turns(NUM_SLOTS + 3) == [0, 1, 2, 3, 0, 1, 2]
    arena.reset()
    assert turns(2) == [0, 1]


class _Once:
    """A timer that calls once, and knows the milliseconds."""

    def __init__(self, ms: dict[str, float]) -> None:
        self._ms = ms

    def prepare(self, run: Callable[[], object]) -> Probe:
        run()
        return lambda: self._ms[getattr(run, "__name__", "")]


def _tuned(rank: int, world_size: int) -> tuple[str, bool, float]:
    """One candidate fails on rank 0 after it has sent, on the others before."""
    arena = _arena()
    logging.disable(logging.WARNING)
    from megascale.flux.symmetric.all_gather import start_all_gather
    from megascale.flux.symmetric.all_reduce import all_reduce

    x_TD = torch.full((ROWS, COLUMNS), 1.0 + rank)
    own_rows = torch.full((2, COLUMNS), float(rank))
    gathering = start_all_gather(own_rows, arena)

    def reference() -> Tensor:
        y_TD = x_TD.clone()
        dist.all_reduce(y_TD)
        return y_TD

    def broken() -> Tensor:
        if rank == 0:
            _half_a_call(arena)
        raise RuntimeError("does not compile")

    def ours() -> Tensor:
        return all_reduce(x_TD, arena)

    candidates: list[Candidate] = [
        Candidate("broken", None, broken),
        Candidate("nccl", None, reference),
        Candidate("plain", None, ours),
    ]
    timer: Any = _Once({"ours": 1.0, "reference": 2.0})
    tuner = Tuner(TuningCache(), dist.group.WORLD, timer, tune="now", arena=arena)
    key = Key.of(Problem("gemm_ar", ROWS, COLUMNS, 8, world_size, torch.float32, "NK"))
    chosen = tuner.choose(key, candidates)
    _sums(arena, 5)
    wanted = torch.arange(world_size).repeat_interleave(2)[:, None].expand(-1, COLUMNS)
    same = torch.equal(gathering.wait(), wanted.float())
    choice = tuner.known(key)
    assert choice is not None
    return chosen.name, same, choice.ms.get("broken", -1.0)


def test_the_tuner_goes_on_after_a_candidate_that_has_sent_and_failed() -> None:
    """And a gather that was started before has its rows, whatever was measured meanwhile."""
    assert run_ranks(_tuned, 2) == [("plain", True, -1.0)] * 2
