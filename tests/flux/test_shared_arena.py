"""The CPU stand-in of the arena carries data, keeps slots as long as promised, tells misuse."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.arena import NUM_FLAGS, Slot
from tests.distributed import run_ranks
from tests.flux.shared_arena import SharedArena, interpret_kernels


def _arena(num_bytes: int = 1 << 16, jitter_s: float = 0.0) -> SharedArena:
    assert dist.group.WORLD is not None
    return SharedArena(dist.group.WORLD, num_bytes, jitter_s=jitter_s)


def _value(call: int, source: int) -> float:
    return call * 100.0 + source


def _push(arena: SharedArena, slot: Slot, call: int, width: int) -> None:
    """What a copy engine does: a row into every peer, then its flag."""
    row = torch.full((width,), _value(call, arena.rank))
    for peer in range(arena.world_size):
        slot.view(peer, (arena.world_size, width), torch.float32)[arena.rank].copy_(row)
        slot.flags[peer][arena.rank : arena.rank + 1].copy_(arena.one)


def _pull(arena: SharedArena, slot: Slot, width: int) -> Tensor:
    """Wait for the rows of all ranks and reset the flags."""
    own = slot.flags[arena.rank]
    deadline = time.monotonic() + 30
    while not bool(own[: arena.world_size].all()):
        assert time.monotonic() < deadline, own[: arena.world_size]
        time.sleep(0)
    own[: arena.world_size] = 0
    return slot.view(arena.rank, (arena.world_size, width), torch.float32)


def _wanted(call: int, world_size: int, width: int) -> Tensor:
    return torch.tensor([_value(call, source) for source in range(world_size)])[:, None].expand(
        -1, width
    )


def _gathers(rank: int, world_size: int) -> list[int]:
    arena = _arena(64, jitter_s=0.003)
    held: list[tuple[int, Tensor]] = []
    for call in range(60):
        width = 5 + call % 7 * 40  # grows several times
        with arena.turn(world_size * width * 4) as slot:
            _push(arena, slot, call, width)
            # before the call but one after it has begun, a call's rows are still there
            (still,) = [g for c, g in held if c == call - 1] or [_wanted(call - 1, world_size, 1)]
            assert torch.equal(still, _wanted(call - 1, world_size, still.shape[1])), call
            gathered = _pull(arena, slot, width)
        assert torch.equal(gathered, _wanted(call, world_size, width)), (call, gathered)
        held = [(call, gathered)]
    return [arena.turns, int(sum(f[rank].count_nonzero() for f in [s.flags for s in arena._slots]))]


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_arrive_and_stay_for_a_call(world_size: int) -> None:
    for turns, flags_left in run_ranks(_gathers, world_size):
        assert turns >= 60
        assert flags_left == 0


def _misuses(rank: int, world_size: int) -> tuple[bool, str]:
    arena = _arena()
    views = []
    for call in range(3):
        with arena.turn(1 << 12) as slot:
            _push(arena, slot, call, 8)
            views.append(_pull(arena, slot, 8))
    poisoned = bool(views[0].isnan().all()) and not bool(views[1].isnan().any())
    dist.barrier()
    slot.flags[rank][NUM_FLAGS - 1] = 1
    with arena.turn(1), pytest.raises(AssertionError) as caught, arena.turn(1):
        pass
    return poisoned, str(caught.value)


def test_late_reads_and_flags_that_stay_are_found() -> None:
    for rank, (poisoned, error) in enumerate(run_ranks(_misuses, 2)):
        assert poisoned
        assert error == f"rank {rank}, call 4: flags [{NUM_FLAGS - 1}] were not reset"


def _kernels(rank: int, world_size: int) -> bool:
    interpret_kernels()
    from tests.flux.peer_kernel import exchange_kernel

    arena = _arena(jitter_s=0.002)
    for call in range(10):
        x = torch.full((16,), _value(call, rank))
        out = torch.empty(world_size, 16)
        with arena.turn(world_size * 64) as slot:
            exchange_kernel[(1,)](
                x,
                out,
                slot.data_ptrs,
                slot.flag_ptrs,
                arena.report,
                rank,
                WORLD=world_size,
                SIZE=16,
            )
        assert torch.equal(out, _wanted(call, world_size, 16)), (call, out)
    return True


def test_interpreted_kernels_reach_their_peers() -> None:
    pytest.importorskip("triton")
    assert run_ranks(_kernels, 3) == [True] * 3
