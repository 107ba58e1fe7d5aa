"""The chunked forms queue on three streams what gives the right values in every order that events
and flags allow: own product, transfers, waits and sums of several calls of all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.flux import lanes
from megascale.flux.all_gather_gemm import chunked as ag
from megascale.flux.arena import Arena
from megascale.flux.gemm_reduce_scatter import chunked as rs
from megascale.flux.problem import Problem, own_rows
from tests.flux.simulated_streams import (
    Device,
    SimulatedArena,
    arenas,
    call,
    simulate_kernels,
)

K, N = 6, 10
ROWS = [13, 4, 700, 3, 16]  # of the calls of a run, all ranks together; one shard is cut

AG_CONFIGS = [
    ag.ChunkedAllGather(),
    ag.ChunkedAllGather(two_streams=False),
    ag.ChunkedAllGather(pieces=2, growth=1, stream_wait=True),
    ag.ChunkedAllGather(pieces=3),
]
RS_CONFIGS = list(
    dict.fromkeys(
        [
            rs.ChunkedReduceScatter(chunks=2, fold=True, stream_wait=True),
            rs.ChunkedReduceScatter(chunks=2, fold=True, store=True, stream_wait=True),
            *rs.candidates(Problem("gemm_rs", 4096, N, K, 4, torch.float32, "NK")),
            rs.ChunkedReduceScatter(two_streams=False, own_blocks=2, chunks=2),
            rs.ChunkedReduceScatter(chunks=3, own_blocks=2),
            rs.ChunkedReduceScatter(fold=True, two_streams=False, chunks=2),
            rs.ChunkedReduceScatter(split="columns", chunks=3, two_streams=False),
        ]
    )
)


class Run:
    """Calls of all ranks; what is read of their results, and what it must be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int, seed: int) -> None:
        self.device = Device(monkeypatch)
        simulate_kernels(monkeypatch, self.device)
        self.arenas = arenas(world_size, 4 * max(ROWS) * (K + N) * world_size, self.device)
        self.random = torch.Generator().manual_seed(seed)
        self.read: list[tuple[str, Tensor, Tensor]] = []

    def values(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def produce(self, arena: SimulatedArena, value: Tensor) -> Tensor:
        """A tensor that the rank's stream fills now, and overwrites when `forget` is called."""
        x = torch.full_like(value, torch.nan)
        arena.compute.queue(lambda: x.copy_(value))
        return x

    def forget(self, arena: SimulatedArena, x: Tensor) -> None:
        arena.compute.queue(lambda: x.fill_(torch.nan))

    def expect(self, what: str, arena: SimulatedArena, y: Tensor, wanted: Tensor) -> None:
        """The rank's stream reads `y` now."""
        seen = torch.full_like(y, torch.nan)
        arena.compute.queue(lambda: seen.copy_(y))
        self.read.append((f"{what} on rank {arena.rank}", seen, wanted))

    def check(self, seed: int) -> None:
        self.device.run(seed)
        for what, seen, wanted in self.read:
            torch.testing.assert_close(seen, wanted, msg=partial("{}: {}".format, what))
        assert not any(bool(flags.any()) for flags in self.device.flags)


def _gather(run: Run, m: int, config: ag.ChunkedAllGather, before: list[Any]) -> list[Any]:
    """One call of every rank; gathered rows are read after the next call (`before`)."""
    world_size = len(run.arenas)
    x_TK, weight, bias = run.values(m, K), run.values(N, K), run.values(N)
    held = []
    for arena in run.arenas:
        x = run.produce(arena, x_TK[slice(*own_rows(m, arena.rank, world_size))])
        form = partial(
            ag.all_gather_gemm, x, [weight], [bias], arena, layout="NK", num_rows=m, gathered=True
        )
        form = partial(form, config=config)
        (y,), gathered = call(arena, run.device, form, keep=1)
        run.forget(arena, x)
        run.expect(f"y of {config}, m {m}", arena, y, x_TK @ weight.t() + bias)
        held.append((arena, gathered, x_TK, f"gathered of {config}, m {m}"))
    for arena, gathered, wanted, what in before:
        run.expect(what, arena, gathered, wanted)
    return held


def _scatter(run: Run, m: int, config: rs.ChunkedReduceScatter, bias: Tensor | None) -> None:
    world_size = len(run.arenas)
    parts = [(run.values(m, K), run.values(K, N)) for _ in run.arenas]
    whole = torch.stack([x @ w for x, w in parts]).sum(0) + (0 if bias is None else bias)
    for arena in run.arenas:
        x = run.produce(arena, parts[arena.rank][0])
        form = partial(rs.gemm_reduce_scatter, x, parts[arena.rank][1], bias, arena, layout="KN")
        form = partial(form, config=config)
        y = call(arena, run.device, form, keep=1)
        run.forget(arena, x)
        wanted = whole[slice(*own_rows(m, arena.rank, world_size))]
        run.expect(f"{config}, m {m}", arena, y, wanted)


def _gathers(monkeypatch: pytest.MonkeyPatch, config: Any, world_size: int, seed: int) -> None:
    run = Run(monkeypatch, world_size, seed)
    held: list[Any] = []
    for m in ROWS:
        held = _gather(run, m, config, held)
    run.check(seed)


def _scatters(monkeypatch: pytest.MonkeyPatch, config: Any, world_size: int, seed: int) -> None:
    run = Run(monkeypatch, world_size, seed)
    for index, m in enumerate(ROWS):
        _scatter(run, m, config, run.values(N) if index % 2 else None)
    run.check(seed)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("config", AG_CONFIGS, ids=str)
def test_gather_in_any_order(
    monkeypatch: pytest.MonkeyPatch, config: ag.ChunkedAllGather, world_size: int
) -> None:
    for seed in range(4):
        _gathers(monkeypatch, config, world_size, seed)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("config", RS_CONFIGS, ids=str)
def test_scatter_in_any_order(
    monkeypatch: pytest.MonkeyPatch, config: rs.ChunkedReduceScatter, world_size: int
) -> None:
    for seed in range(4):
        _scatters(monkeypatch, config, world_size, seed)


# The simulation finds what it is for.


def _wrong(monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any) -> None:
    for seed in range(40):
        calls(monkeypatch, config, 2, seed)


@pytest.mark.parametrize(
    ("calls", "config"),
    [
        (_gathers, ag.ChunkedAllGather(two_streams=False)),
        (_scatters, rs.ChunkedReduceScatter()),
        (_scatters, rs.ChunkedReduceScatter(split="columns", chunks=2)),
    ],
    ids=["gather", "rows", "columns"],
)
def test_a_missing_join_of_the_copies_is_found(
    monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any
) -> None:
    monkeypatch.setattr(Arena, "join", lambda self: None)
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, calls, config)


def test_a_missing_join_of_the_lanes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes.Lanes, "join", lambda self: None)
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, _gathers, ag.ChunkedAllGather())


@pytest.mark.parametrize(
    "config",
    [rs.ChunkedReduceScatter(own_blocks=2), rs.ChunkedReduceScatter(fold=True, chunks=2)],
    ids=["sum", "fold"],
)
def test_a_missing_fork_is_found(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    monkeypatch.setattr(lanes.Lanes, "fork", lambda self: None)
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, _scatters, config)


def test_copies_that_do_not_follow_the_gemm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "side", lambda self: torch.cuda.stream(self._copies))
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, _scatters, rs.ChunkedReduceScatter())
