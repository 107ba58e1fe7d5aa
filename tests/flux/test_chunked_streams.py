"""The chunked forms queue on three streams what gives the right values in every order that events
and flags allow: own product, transfers, waits and sums of several calls of all ranks.

Sizes come again in the same slot: the first time a kernel waits, later the stream itself does.
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
from megascale.flux.problem import Problem
from megascale.flux.tiles import shard_rows
from tests.flux.simulated_streams import (
    Device,
    Driver,
    SimulatedArena,
    arenas,
    call,
    simulate_kernels,
)

K, N = 6, 10
# Of the calls of a run, all ranks together. One shard is cut, and a size comes again in its slot.
ROWS = [13, 4, 700, 3, 13, 4, 16]

AG_CONFIGS = list(
    dict.fromkeys(
        [
            *ag.candidates(Problem("ag_gemm", 4096, N, K, 4, torch.float32, "NK")),
            ag.ChunkedAllGather(pieces=2, growth=1, two_streams=True),
            ag.ChunkedAllGather(pieces=3),
        ]
    )
)
RS_CONFIGS = list(
    dict.fromkeys(
        [
            *rs.candidates(Problem("gemm_rs", 4096, N, K, 4, torch.float32, "NK")),
            rs.ChunkedReduceScatter(chunks=3, growth=1, two_streams=True),
            rs.ChunkedReduceScatter(chunks=2, fold=True),
            rs.ChunkedReduceScatter(chunks=2, fold=True, store=True, two_streams=True),
        ]
    )
)
TWO_LANES = [
    rs.ChunkedReduceScatter(chunks=2, two_streams=True),
    rs.ChunkedReduceScatter(chunks=2, fold=True, two_streams=True),
]


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
        self.device.memory.append(x)
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


def _gather(
    run: Run, m: int, config: ag.ChunkedAllGather, before: list[Any], *, gathered: bool
) -> list[Any]:
    """One call of every rank; gathered rows are read after the next call (`before`)."""
    world_size = len(run.arenas)
    x_TK, weight, bias = run.values(m, K), run.values(N, K), run.values(N)
    held = []
    for arena in run.arenas:
        x = run.produce(arena, x_TK[slice(*shard_rows(m, world_size, arena.rank))])
        form = partial(
            ag.all_gather_gemm, x, [weight], [bias], arena, layout="NK", num_rows=m, config=config
        )
        (y,), rows = call(arena, run.device, partial(form, gathered=gathered), keep=1)
        run.forget(arena, x)
        run.expect(f"y of {config}, m {m}", arena, y, x_TK @ weight.t() + bias)
        if gathered:
            held.append((arena, rows, x_TK, f"gathered of {config}, m {m}"))
    for arena, rows, wanted, what in before:
        run.expect(what, arena, rows, wanted)
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
        wanted = whole[slice(*shard_rows(m, world_size, arena.rank))]
        run.expect(f"{config}, m {m}", arena, y, wanted)


def _gathers(
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    world_size: int,
    seed: int,
    capture: int | None = None,
) -> Run:
    run = Run(monkeypatch, world_size, seed)
    run.device.capture = capture
    held: list[Any] = []
    for index, m in enumerate(ROWS):
        held = _gather(run, m, config, held, gathered=(seed + index) % 4 < 3)
    run.check(seed)
    return run


def _scatters(
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    world_size: int,
    seed: int,
    capture: int | None = None,
) -> Run:
    run = Run(monkeypatch, world_size, seed)
    run.device.capture = capture
    for index, m in enumerate(ROWS):
        _scatter(run, m, config, run.values(N) if index % 2 else None)
    run.check(seed)
    return run


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("config", AG_CONFIGS, ids=str)
def test_gather_in_any_order(
    monkeypatch: pytest.MonkeyPatch, config: ag.ChunkedAllGather, world_size: int
) -> None:
    for seed in range(4):
        run = _gathers(monkeypatch, config, world_size, seed)
        assert run.device.calls["wait"], "no stream waited for a flag"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("config", RS_CONFIGS, ids=str)
def test_scatter_in_any_order(
    monkeypatch: pytest.MonkeyPatch, config: rs.ChunkedReduceScatter, world_size: int
) -> None:
    for seed in range(4):
        run = _scatters(monkeypatch, config, world_size, seed)
        assert run.device.calls["wait"], "no stream waited for a flag"


@pytest.mark.parametrize(
    ("calls", "config"),
    [
        (_gathers, ag.DEFAULT),
        (_gathers, ag.ChunkedAllGather(pieces=2, two_streams=True)),
        (_scatters, rs.DEFAULT),
        *((_scatters, config) for config in TWO_LANES),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_what_is_captured_has_no_waits_or_writes_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any
) -> None:
    for seed in range(4):
        calls(monkeypatch, config, 2, seed, capture=1)  # the driver refuses them


def test_copies_of_an_arena_come_after_the_current_stream_and_before_a_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(20):
        device = Device(monkeypatch)
        (arena,) = arenas(1, 16, device)
        order: list[str] = []
        with device.stream(arena.compute):
            device.current.queue(partial(order.append, "before"))
            arena.fork()
            device.streams[arena._copies_handle].queue(partial(order.append, "copies"))
            arena.join()
            device.current.queue(partial(order.append, "after"))
        device.run(seed)
        assert order == ["before", "copies", "after"]


# The simulation finds what it is for.


def _wrong(monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any) -> None:
    for seed in range(40):
        calls(monkeypatch, config, 2, seed)


@pytest.mark.parametrize(
    ("calls", "config"), [(_gathers, ag.DEFAULT), (_scatters, rs.DEFAULT)], ids=["gather", "rows"]
)
def test_a_missing_join_of_the_copies_is_found(
    monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any
) -> None:
    monkeypatch.setattr(Arena, "join", lambda self: None)
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, calls, config)


@pytest.mark.parametrize(
    ("calls", "config"),
    [(_gathers, ag.ChunkedAllGather(two_streams=True)), (_scatters, TWO_LANES[1])],
    ids=["gather", "rows"],
)
def test_a_missing_join_of_the_lanes_is_found(
    monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any
) -> None:
    monkeypatch.setattr(lanes.Lanes, "join", lambda self: None)
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, calls, config)


@pytest.mark.parametrize(
    ("calls", "config"),
    [(_gathers, ag.DEFAULT), *((_scatters, config) for config in TWO_LANES)],
    ids=["gather", "sum", "fold"],
)
def test_a_missing_fork_is_found(monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any) -> None:
    monkeypatch.setattr(lanes.Lanes, "fork", lambda self: None)
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, calls, config)


@pytest.mark.parametrize(
    ("calls", "config"), [(_gathers, ag.DEFAULT), (_scatters, rs.DEFAULT)], ids=["gather", "rows"]
)
@pytest.mark.parametrize("missing", ["wait", "write"])
def test_a_missing_wait_or_a_flag_that_stays_is_found(
    monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any, missing: str
) -> None:
    real = getattr(Driver, missing)
    kept = {"wait": lambda *_: None, "write": lambda self, a, v, s: v and real(self, a, v, s)}
    monkeypatch.setattr(Driver, missing, kept[missing])
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, calls, config)


@pytest.mark.parametrize(
    ("calls", "config"), [(_gathers, ag.DEFAULT), (_scatters, rs.DEFAULT)], ids=["gather", "rows"]
)
def test_copies_that_do_not_follow_the_current_stream_are_found(
    monkeypatch: pytest.MonkeyPatch, calls: Any, config: Any
) -> None:
    monkeypatch.setattr(Arena, "fork", lambda self: None)
    with pytest.raises(AssertionError):
        _wrong(monkeypatch, calls, config)


def test_a_stream_that_waits_under_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "capturing", property(lambda self: False))
    run_captured = partial(_gathers, capture=1)
    with pytest.raises(AssertionError, match="not captured"):
        _wrong(monkeypatch, run_captured, ag.DEFAULT)
