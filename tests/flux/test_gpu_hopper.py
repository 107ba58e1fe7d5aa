"""The Hopper kernels on one GPU, with virtual ranks: values, flags at rest, repeatability."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.flux.virtual_ranks import VirtualArena, flags_at_rest, on_all, virtual_arenas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


@dataclass(frozen=True)
class Tiles:
    """What the engine reads of a configuration."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_stages: int = 3
    chunks: int = 1
    pieces: int = 16


def _data(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device="cuda") / shape[-1] ** 0.25).to(dtype)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def _rows(m: int, world: int, rank: int) -> slice:
    each = -(-m // world)
    return slice(min(rank * each, m), min((rank + 1) * each, m))


def check_all_gather_gemm(
    world: int, m: int, n: int, k: int, layout: str, bias: bool, tiles: Tiles, dtype: torch.dtype
) -> None:
    from megascale.flux.all_gather_gemm.hopper import launch
    from megascale.flux.all_gather_gemm.protocol import GatherTiles

    x, each = _data(m, k, dtype=dtype), -(-m // world)
    weights = [_data(n, k, dtype=dtype) for _ in range(world)]
    biases = [_data(n, dtype=dtype) if bias else None for _ in range(world)]
    arenas = virtual_arenas(world, world * each * k * 2)
    grid = GatherTiles(m, world, 0, tiles.block_m, -(-n // tiles.block_n), chunks=tiles.chunks)

    def call(rank: int, arena: VirtualArena) -> Tensor:
        own = x[_rows(m, world, rank)]
        out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
        with arena.turn(world * each * k * 2) as slot:
            if grid.straddling:
                gathered = slot.view(rank, (world, each, k), dtype)
                gathered[rank][: own.shape[0]].copy_(own)
            arena.fork()
            for step in range(1, world):
                peer = (rank - step) % world
                there = slot.view(peer, (world, each, k), dtype)[rank]
                for chunk in range(grid.num_chunks):
                    part = slice(chunk * grid.rows_per_chunk, (chunk + 1) * grid.rows_per_chunk)
                    to, source = there[part].data_ptr(), own[part].data_ptr()
                    flag = slot.flags[peer].data_ptr() + 4 * (rank * grid.num_chunks + chunk)
                    arena.send(to, source, own[part].nbytes, flag)
            weight = weights[rank] if layout == "NK" else weights[rank].t().contiguous()
            launch(
                own,
                slot.view(rank, (world, each, k), dtype),
                weight,
                biases[rank],
                out,
                slot if world > 1 else None,
                arena,  # type: ignore[arg-type]
                tiles,
                layout,
                m,
            )
            arena.join()
        return out

    for _ in range(4):  # all slots, and the first again
        for rank, out in enumerate(on_all(arenas, call)):
            wanted = x.float() @ weights[rank].float().t()
            if bias:
                wanted += biases[rank].float()  # type: ignore[union-attr]
            assert _error(out, wanted) < 5e-3, (world, m, n, k, layout, rank)
        assert flags_at_rest(arenas)
        assert all(int(arena.done.abs().max()) == 0 for arena in arenas)


GATHER = [
    (1, 512, 768, 512, "NK", False, Tiles()),
    (1, 1000, 776, 520, "KN", True, Tiles()),
    (2, 512, 768, 512, "NK", True, Tiles()),
    (2, 2048, 1000, 1024, "KN", False, Tiles(chunks=2)),
    (2, 1000, 776, 520, "NK", True, Tiles()),
    (2, 1001, 776, 520, "KN", False, Tiles(chunks=3)),
    (2, 1, 256, 64, "NK", False, Tiles()),
    (3, 1027, 776, 136, "NK", False, Tiles(block_n=128, num_stages=4)),
    (4, 4096, 1024, 512, "NK", False, Tiles(block_m=256, block_n=128)),
    (2, 4096, 2048, 512, "NK", True, Tiles(block_n=128, num_stages=5)),
    (8, 4096, 512, 512, "NK", False, Tiles()),
]


@pytest.mark.parametrize("case", GATHER, ids=str)
def test_all_gather_gemm(case: tuple[int, int, int, int, str, bool, Tiles]) -> None:
    check_all_gather_gemm(*case, torch.bfloat16)


def test_all_gather_gemm_in_fp16() -> None:
    check_all_gather_gemm(2, 1024, 512, 512, "NK", True, Tiles(), torch.float16)


def check_gemm_reduce_scatter(
    world: int, m: int, n: int, k: int, layout: str, bias: bool, tiles: Tiles, dtype: torch.dtype
) -> None:
    from megascale.flux.gemm_reduce_scatter.hopper_launch import launch

    each = -(-m // world)
    x, weights = (
        [_data(m, k, dtype=dtype) for _ in range(world)],
        [_data(n, k, dtype=dtype) for _ in range(world)],
    )
    added = _data(n, dtype=dtype) if bias else None
    arenas = virtual_arenas(world, world * each * n * 2)
    wanted = sum(a.float() @ w.float().t() for a, w in zip(x, weights, strict=True))
    assert isinstance(wanted, Tensor)
    if added is not None:
        wanted = wanted + added.float()

    def call(rank: int, arena: VirtualArena) -> Tensor:
        rows = _rows(m, world, rank)
        out = torch.full((rows.stop - rows.start, n), float("nan"), device="cuda", dtype=dtype)
        weight = weights[rank] if layout == "NK" else weights[rank].t().contiguous()
        with arena.turn(world * each * n * 2) as slot:
            launch(x[rank], weight, added, out, slot, arena, tiles, layout)  # type: ignore[arg-type]
        return out

    first: list[Tensor] = []
    for _ in range(4):
        found = on_all(arenas, call)
        whole = torch.cat(found)
        assert _error(whole, wanted) < 5e-3, (world, m, n, k, layout)
        assert flags_at_rest(arenas)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


_DIRECT = Tiles(chunks=0)
SCATTER = [
    (2, 512, 768, 512, "NK", False, _DIRECT),
    (2, 512, 768, 64, "NK", True, _DIRECT),
    (2, 4096, 2048, 1024, "KN", False, _DIRECT),
    (2, 1000, 776, 520, "NK", True, _DIRECT),
    (2, 1, 256, 64, "NK", False, _DIRECT),
    (3, 1027, 776, 136, "KN", True, Tiles(block_n=128, num_stages=4, chunks=0)),
    (4, 4096, 1024, 2048, "NK", False, Tiles(block_m=256, block_n=128, chunks=0)),
    (8, 4096, 512, 512, "NK", False, _DIRECT),
    (2, 1000, 776, 520, "NK", True, Tiles(pieces=1, chunks=0)),
    (2, 1000, 776, 520, "NK", True, Tiles(block_n=128, num_stages=5, pieces=8, chunks=0)),
    (2, 4096, 2048, 1024, "NK", True, Tiles(chunks=1)),
    (2, 4096, 2048, 1024, "KN", False, Tiles(chunks=4, group_m=4)),
    (2, 1000, 776, 520, "NK", True, Tiles(chunks=3, group_m=1)),
    (2, 1, 256, 64, "NK", False, Tiles(chunks=2)),
    (3, 1027, 776, 136, "KN", True, Tiles(block_n=128, num_stages=4, chunks=2, group_m=1)),
    (8, 4096, 512, 512, "NK", False, Tiles(chunks=2, group_m=1)),
]


@pytest.mark.parametrize("case", SCATTER, ids=str)
def test_gemm_reduce_scatter(case: tuple[int, int, int, int, str, bool, Tiles]) -> None:
    check_gemm_reduce_scatter(*case, torch.bfloat16)


@pytest.mark.parametrize("tiles", [_DIRECT, Tiles(chunks=2, group_m=2)], ids=str)
@pytest.mark.parametrize(("k", "k2"), [(512, 1024), (64, 520), (2048, 64)])
def test_two_products_share_a_reduce_scatter(k: int, k2: int, tiles: Tiles) -> None:
    from megascale.flux.gemm_reduce_scatter.hopper_launch import launch

    world, m, n = 2, 1000, 776
    x, x2 = ([_data(m, size) for _ in range(world)] for size in (k, k2))
    weights, weights2 = ([_data(n, size) for _ in range(world)] for size in (k, k2))
    terms = zip([*x, *x2], [*weights, *weights2], strict=True)
    wanted = torch.stack([a.float() @ w.float().t() for a, w in terms]).sum(0)
    arenas = virtual_arenas(world, m * n * 2)

    def call(rank: int, arena: VirtualArena) -> Tensor:
        rows = _rows(m, world, rank)
        out = torch.full((rows.stop - rows.start, n), float("nan"), device="cuda").bfloat16()
        with arena.turn(m * n * 2) as slot:
            launch(
                x[rank],
                weights[rank],
                None,
                out,
                slot,
                arena,  # type: ignore[arg-type]
                tiles,
                "NK",
                pair=(x2[rank], weights2[rank]),
            )
        return out

    for _ in range(4):
        assert _error(torch.cat(on_all(arenas, call)), wanted) < 5e-3
        assert flags_at_rest(arenas)


def test_gemm_reduce_scatter_in_fp16() -> None:
    check_gemm_reduce_scatter(2, 1024, 512, 512, "NK", True, Tiles(), torch.float16)
