"""The chunked forms: the plan covers everything once, and values equal those of the whole product.

Ranks are gloo processes with an arena over shared files; the few kernels run in the interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.all_gather_gemm import chunked as ag
from megascale.flux.gemm_reduce_scatter import chunked as rs
from megascale.flux.gemm_reduce_scatter.chunked_rows import cut_rows
from megascale.flux.lanes import block_length, block_of, growing, num_blocks
from megascale.flux.problem import Layout, Problem
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks

WORLDS = [1, 2, 3, 4, 5, 8]
ROWS = [1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 257, 600, 1024, 4097]

AG_CONFIGS = [
    ag.ChunkedAllGather(pieces, growth, two_streams)
    for pieces, growth, two_streams in itertools.product((1, 2, 3), (1, 2, 4), (True, False))
]
RS_CONFIGS = [
    rs.ChunkedReduceScatter(),
    rs.ChunkedReduceScatter(two_streams=True),
    rs.ChunkedReduceScatter(chunks=3, growth=1),
    rs.ChunkedReduceScatter(chunks=2, two_streams=True),
    rs.ChunkedReduceScatter(store=True, chunks=2),
    rs.ChunkedReduceScatter(fold=True),
    rs.ChunkedReduceScatter(fold=True, chunks=2, two_streams=True),
    rs.ChunkedReduceScatter(fold=True, chunks=3, growth=1, store=True),
]


def _problem(m: int, world_size: int) -> Problem:
    return Problem("ag_gemm", m, 64, 32, world_size, torch.bfloat16, "NK")


# The plans.


@pytest.mark.parametrize("length", [0, 1, 5, 127, 128, 129, 256, 300, 4096])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_blocks_cover_a_shard_once(length: int, count: int) -> None:
    block = block_length(length, count)
    blocks = num_blocks(length, block)
    assert 1 <= blocks <= count
    if length >= 128 * count:
        assert block % 128 == 0
    for short in {length, length // 2, min(length, 1), 0}:
        rows = [r for i in range(blocks) for r in range(*block_of(10, 10 + short, block, i))]
        assert rows == list(range(10, 10 + short)), (block, short)


@pytest.mark.parametrize("growth", [1, 2, 3])
def test_groups_grow_and_cover(growth: int) -> None:
    for count in range(12):
        groups = list(growing(count, growth))
        assert [i for group in groups for i in group] == list(range(count))
        sizes = [len(group) for group in groups]
        assert sizes[:-1] == [growth**i for i in range(len(sizes) - 1)]
    assert [len(group) for group in growing(7, 2)] == [1, 2, 4]


@pytest.mark.parametrize("world_size", WORLDS)
def test_gather_reads_each_row_and_flag_once_and_in_order_of_arrival(world_size: int) -> None:
    configs = {*AG_CONFIGS, *ag.candidates(_problem(4096, world_size))}
    for m, config, rank in itertools.product(ROWS, configs, range(world_size)):
        parts = ag.remote_parts(m, world_size, rank, config)
        pieces = ag.num_pieces(m, world_size, config)
        own = shard_rows(m, world_size, rank)
        rows = [r for part in parts for r in range(part.first_row, part.end_row)]
        assert sorted([*rows, *range(*own)]) == list(range(m)), (m, config, rank)
        flags = [f for part in parts for f in range(part.first_flag, part.end_flag)]
        arrival = [(rank + s) % world_size for s in range(1, world_size)]
        assert flags == [source * pieces + p for source in arrival for p in range(pieces)]
        for part in parts:  # the rows of a part are those of its flags
            sources = {f // pieces for f in range(part.first_flag, part.end_flag)}
            for row in range(part.first_row, part.end_row):
                assert row // -(-m // world_size) in sources, (m, config, rank, part)


def test_eight_ranks_take_four_gemms_or_five_around_the_end() -> None:
    numbers = [len(ag.remote_parts(4096, 8, rank, ag.DEFAULT)) for rank in range(8)]
    assert numbers == [3, 4, 4, 4, 3, 4, 3, 3]  # beside the own one; 4 where a group wraps
    assert [len(ag.remote_parts(4096, 2, rank, ag.DEFAULT)) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("world_size", WORLDS[1:])
def test_scatter_multiplies_each_row_once_the_own_last(world_size: int) -> None:
    candidates = rs.candidates(_problem(4096, world_size))
    configs = {*RS_CONFIGS, *candidates}
    for m, config, rank in itertools.product(ROWS, configs, range(world_size)):
        cut = cut_rows(m, world_size, rank, config)
        blocks = [block for group in cut.remote for block in group]
        order = [(rank + s) % world_size for s in range(1, world_size)]
        wanted = [(owner, chunk) for owner in order for chunk in range(cut.chunks)]
        assert [(b.owner, b.chunk) for b in blocks] == wanted, (m, config, rank)
        rows = [r for b in (*blocks, *cut.own) for r in range(b.first, b.end)]
        assert sorted(rows) == list(range(m)), (m, config, rank)
        for b in blocks:
            first, end = shard_rows(m, world_size, b.owner)
            assert b.first == b.end or first <= b.first <= b.end <= end
            assert b.first == min(first + b.chunk * cut.block, end)  # where the owner expects it
        for group in cut.remote:  # one GEMM
            assert all(a.end == b.first for a, b in itertools.pairwise(group))
        assert [b.chunk for b in cut.own] == list(range(cut.chunks))  # what it waits for


def test_scatter_ends_with_small_groups() -> None:
    def sizes(world_size: int, rank: int) -> list[int]:
        return [len(g) for g in cut_rows(4096, world_size, rank, rs.DEFAULT).remote]

    assert sizes(8, 7) == [4, 2, 1]
    assert sizes(4, 0) == [2, 1]
    assert sizes(2, 1) == [1]


@pytest.mark.parametrize("module", [ag, rs])
def test_candidates_are_distinct_and_begin_with_the_default(module: Any) -> None:
    for m, world_size in itertools.product((1, 64, 2048, 16384), (1, 2, 4, 8)):
        found = module.candidates(_problem(m, world_size))
        assert found[0] == module.DEFAULT
        assert len(set(found)) == len(found)
        assert (len(found) == 1) == (world_size == 1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: ag.ChunkedAllGather(pieces=0), "pieces"),
        (lambda: ag.ChunkedAllGather(growth=0), "growth"),
        (lambda: rs.ChunkedReduceScatter(chunks=0), "chunks"),
        (lambda: rs.ChunkedReduceScatter(growth=0), "growth"),
    ],
)
def test_configurations_that_mean_nothing_are_refused(wrong: Any, named: str) -> None:
    with pytest.raises(FluxError, match=named):
        wrong()


# The values.


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def _stored(weight_KN: Tensor, layout: Layout) -> Tensor:
    return weight_KN.t().contiguous() if layout == "NK" else weight_KN


def _arena(jitter_s: float = 0.0) -> Any:
    from tests.flux.shared_arena import SharedArena

    assert dist.group.WORLD is not None
    return SharedArena(dist.group.WORLD, jitter_s=jitter_s)


def _interpreted() -> None:
    from tests.flux.shared_arena import interpret_kernels

    interpret_kernels()


def _error(y: Tensor, wanted: Tensor) -> float:
    """Largest difference as a part of what the type resolves; NaN stays NaN."""
    y, wanted = y.double(), wanted.double()
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    return float((y - wanted).abs().max()) / scale if y.numel() else 0.0


def _gather_once(
    arena: Any, m: int, config: ag.ChunkedAllGather, layout: Layout, bias: bool, call: int
) -> list[str]:
    """What is wrong with one call, in words."""
    rank, world_size, k = arena.rank, arena.world_size, 24
    x_TK = _random(call, m, k)
    first, end = shard_rows(m, world_size, rank)
    weights = [_random(1000 * call + 10 * rank + i, k, n) for i, n in enumerate((40, 9))]
    biases = [_random(call + i, 40 - 31 * i) if bias or i else None for i in range(2)]
    outputs, gathered = ag.all_gather_gemm(
        x_TK[first:end].requires_grad_(),
        [_stored(w, layout).requires_grad_() for w in weights],
        biases,
        arena,
        layout=layout,
        num_rows=m,
        gathered=call % 2 == 0,
        config=config,
    )
    wrong = []
    if call % 2 == 0 and (gathered is None or not torch.equal(gathered, x_TK)):
        wrong.append(f"gathered, m {m}, {config}")
    for y_TN, w, b in zip(outputs, weights, biases, strict=True):
        wanted = x_TK.double() @ w.double() + (0 if b is None else b.double())
        if y_TN.shape != wanted.shape or not _error(y_TN, wanted) < 1e-5:
            wrong.append(f"y, m {m}, {layout}, bias {bias}, {config}: {_error(y_TN, wanted)}")
    return wrong


def _gathers(
    rank: int, world_size: int, rows: Sequence[int], configs: Sequence[ag.ChunkedAllGather]
) -> list[str]:
    _interpreted()
    arena = _arena(jitter_s=0.001)
    layouts: tuple[Layout, ...] = ("NK", "KN")
    cases = itertools.product(rows, configs)
    return [
        wrong
        for call, (m, config) in enumerate(cases)
        for wrong in _gather_once(arena, m, config, layouts[call % 2], call % 3 == 0, call)
    ]


def _scatter_once(
    arena: Any, m: int, config: rs.ChunkedReduceScatter, layout: Layout, bias: bool, call: int
) -> list[str]:
    rank, world_size, k, n = arena.rank, arena.world_size, 24, 41
    parts = [
        (_random(call + 7 * r, m, k), _random(call + 7 * r + 1, k, n)) for r in range(world_size)
    ]
    x_TK, weight_KN = parts[rank]
    b = _random(call, n) if bias else None
    y_tN = rs.gemm_reduce_scatter(
        x_TK.requires_grad_(),
        _stored(weight_KN, layout).requires_grad_(),
        b,
        arena,
        layout=layout,
        config=config,
    )
    whole = torch.stack([x.detach().double() @ w.double() for x, w in parts]).sum(0)
    wanted = (whole + (0 if b is None else b.double()))[slice(*shard_rows(m, world_size, rank))]
    if y_tN.shape != wanted.shape or not _error(y_tN, wanted) < 1e-5:
        return [f"m {m}, {layout}, bias {bias}, {config}: {_error(y_tN, wanted)}"]
    return []


def _scatters(
    rank: int, world_size: int, rows: Sequence[int], configs: Sequence[rs.ChunkedReduceScatter]
) -> list[str]:
    _interpreted()
    arena = _arena(jitter_s=0.001)
    layouts: tuple[Layout, ...] = ("NK", "KN")
    cases = itertools.product(rows, configs)
    return [
        wrong
        for call, (m, config) in enumerate(cases)
        for wrong in _scatter_once(arena, m, config, layouts[call % 2], call % 3 == 0, call)
    ]


def _repeats(rank: int, world_size: int, config: rs.ChunkedReduceScatter) -> float:
    """The same call three times, bitwise, in bfloat16; its error."""
    _interpreted()
    arena, m = _arena(jitter_s=0.002), 37
    parts = [
        (_random(r, m, 64, dtype=torch.bfloat16), _random(9 + r, 64, 48, dtype=torch.bfloat16))
        for r in range(world_size)
    ]
    results = [
        rs.gemm_reduce_scatter(*parts[rank], None, arena, layout="KN", config=config)
        for _ in range(3)
    ]
    assert all(torch.equal(results[0], y) for y in results[1:])
    whole = torch.stack([x.double() @ w.double() for x, w in parts]).sum(0)
    return _error(results[0], whole[slice(*shard_rows(m, world_size, rank))])


def _both_alternate(rank: int, world_size: int) -> list[str]:
    """A forward and its backward: row-parallel after column-parallel on one arena, m changing."""
    _interpreted()
    arena, wrong = _arena(jitter_s=0.002), []
    for call in range(30):
        m = (5, 16, 1, 33, 300)[call % 5]
        gather = AG_CONFIGS[call % len(AG_CONFIGS)]
        scatter = RS_CONFIGS[call % len(RS_CONFIGS)]
        wrong += _gather_once(arena, m, gather, "NK", False, call)
        wrong += _scatter_once(arena, m, scatter, "KN", True, call)
    return wrong


def _assert_right(by_rank: list[list[str]]) -> None:
    assert not [f"rank {r}: {w}" for r, found in enumerate(by_rank) for w in found]


@pytest.mark.parametrize("world_size", [1, 3])
def test_gathered_products_are_those_of_all_rows(world_size: int) -> None:
    pytest.importorskip("triton")
    _assert_right(run_ranks(_gathers, world_size, [10], AG_CONFIGS[::4]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_scattered_sums_are_those_of_all_ranks(world_size: int) -> None:
    pytest.importorskip("triton")
    _assert_right(run_ranks(_scatters, world_size, [10], RS_CONFIGS))


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_gather_for_every_configuration_and_many_rows(world_size: int) -> None:
    pytest.importorskip("triton")
    _assert_right(run_ranks(_gathers, world_size, [1, 2, 7, 64, 301, 1030], AG_CONFIGS))


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_scatter_for_every_configuration_and_many_rows(world_size: int) -> None:
    pytest.importorskip("triton")
    _assert_right(run_ranks(_scatters, world_size, [1, 2, 7, 64, 301, 1030], RS_CONFIGS))


@pytest.mark.full
@pytest.mark.parametrize("config", [RS_CONFIGS[2], RS_CONFIGS[6]], ids=["sum", "fold"])
def test_scatter_repeats_bitwise(config: rs.ChunkedReduceScatter) -> None:
    pytest.importorskip("triton")
    assert max(run_ranks(_repeats, 3, config)) < 1e-2


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
def test_both_operators_alternate_on_one_arena(world_size: int) -> None:
    pytest.importorskip("triton")
    _assert_right(run_ranks(_both_alternate, world_size))
