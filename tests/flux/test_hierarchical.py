"""Operators over nodes give what the flat ones give: one host whose ranks are cut into nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.all_gather_gemm.nccl import all_gather_gemm as flat_gather
from megascale.flux.gemm_reduce_scatter.nccl import gemm_reduce_scatter as flat_scatter
from megascale.flux.hierarchical import Nodes, all_gather_gemm, gemm_reduce_scatter
from megascale.flux.problem import Layout
from megascale.flux.ranks import GroupOnly
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks

pytestmark = pytest.mark.full  # processes and the interpreter: half a minute together

K = 24
WIDTHS = (16, 9)  # columns of the weights that share a gather
LAYOUTS: tuple[Layout, ...] = ("NK", "KN")
MANY_ROWS = [1, 2, 5, 6, 7, 8, 13, 64, 301]


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def _stored(weight_KN: Tensor, layout: Layout) -> Tensor:
    return weight_KN.t().contiguous() if layout == "NK" else weight_KN


def _differs(what: str, found: Tensor, wanted: Tensor) -> list[str]:
    if found.shape != wanted.shape:
        return [f"{what}: {tuple(found.shape)} for {tuple(wanted.shape)}"]
    error = float((found.double() - wanted.double()).abs().max()) if found.numel() else 0.0
    return [] if error < 1e-4 else [f"{what}: off by {error}"]


def _gather(nodes: Nodes, form: Any, m: int, chunks: int, call: int, *, writes: bool) -> list[str]:
    rank, layout = dist.get_rank(), LAYOUTS[call % 2]
    x_TK = _random(call, m, K)
    weights = [_random(100 * call + 7 * rank + n, K, n) for n in WIDTHS]
    biases = [_random(call + rank, WIDTHS[0]), None]
    arguments = (
        x_TK[slice(*shard_rows(m, nodes.world_size, rank))].requires_grad_(),
        [_stored(w, layout).requires_grad_() for w in weights],
        biases,
    )
    wants = call % 3 == 0
    outputs, gathered = all_gather_gemm(
        *arguments,
        nodes,
        form,
        layout=layout,
        num_rows=m,
        gathered=wants,
        chunks=chunks,
        form_writes=writes,
    )
    case = f"gather, m {m}, chunks {chunks}, {layout}"
    wrong = [] if (gathered is not None) == wants else [f"{case}: gathered {gathered}"]
    if gathered is not None and not torch.equal(gathered, x_TK):
        wrong.append(f"{case}: gathered")
    for y, w, b in zip(outputs, weights, biases, strict=True):
        wrong += _differs(case, y, x_TK @ w + (0 if b is None else b))
    flat, _ = flat_gather(
        arguments[0].detach(),
        [w.detach() for w in arguments[1]],
        biases,
        GroupOnly(_group(), x_TK.device),
        layout=layout,
        num_rows=m,
        gathered=False,
    )
    for y, f in zip(outputs, flat, strict=True):
        wrong += _differs(f"{case}, flat", y, f)
    return wrong


def _scatter(nodes: Nodes, form: Any, m: int, chunks: int, call: int) -> list[str]:
    rank, layout, width = dist.get_rank(), LAYOUTS[call % 2], 37
    parts = [(_random(call + 5 * r, m, K), _random(call + 5 * r + 1, K, width)) for r in range(4)]
    x_TK, weight_KN = parts[rank]
    bias = _random(call, width) if call % 3 else None
    weight = _stored(weight_KN, layout)
    y_tN = gemm_reduce_scatter(
        x_TK.requires_grad_(), weight, bias, nodes, form, layout=layout, chunks=chunks
    )
    whole = torch.stack([x.detach() @ w for x, w in parts]).sum(0) + (0 if bias is None else bias)
    case = f"scatter, m {m}, chunks {chunks}, {layout}"
    wrong = _differs(case, y_tN, whole[slice(*shard_rows(m, nodes.world_size, rank))])
    flat = flat_scatter(
        x_TK.detach(), weight, bias, GroupOnly(_group(), x_TK.device), layout=layout
    )
    return wrong + _differs(f"{case}, flat", y_tN, flat)


def _with_reference(
    rank: int, world_size: int, ranks_per_node: int, rows: Sequence[int]
) -> list[str]:
    nodes = Nodes.of(_group(), ranks_per_node, partial(GroupOnly, device=torch.device("cpu")))
    wrong = []
    if (nodes.node, nodes.num_nodes) != (rank // ranks_per_node, world_size // ranks_per_node):
        wrong.append(f"node {nodes.node} of {nodes.num_nodes}")
    for call, (m, chunks) in enumerate(itertools.product(rows, (1, 2, 3))):
        wrong += _gather(nodes, flat_gather, m, chunks, call, writes=False)
        wrong += _scatter(nodes, flat_scatter, m, chunks, call)
    return wrong


def _with_chunked(
    rank: int, world_size: int, ranks_per_node: int, rows: Sequence[int]
) -> list[str]:
    """Inside a node the chunked form over shared memory, which writes into the output itself."""
    from tests.flux.shared_arena import SharedArena, interpret_kernels

    interpret_kernels()
    from megascale.flux.all_gather_gemm import chunked as ag
    from megascale.flux.gemm_reduce_scatter import chunked as rs

    nodes = Nodes.of(_group(), ranks_per_node, partial(SharedArena, jitter_s=0.002))
    fold = partial(rs.gemm_reduce_scatter, config=rs.ChunkedReduceScatter(fold=True, chunks=2))
    wrong = []
    for call, (m, chunks) in enumerate(itertools.product(rows, (1, 2))):
        wrong += _gather(nodes, ag.all_gather_gemm, m, chunks, call, writes=True)
        wrong += _scatter(nodes, fold if call % 2 else rs.gemm_reduce_scatter, m, chunks, call)
    return wrong


def _repeats(rank: int, world_size: int, ranks_per_node: int) -> list[str]:
    nodes = Nodes.of(_group(), ranks_per_node, partial(GroupOnly, device=torch.device("cpu")))
    x_TK = _random(rank, 21, K, dtype=torch.bfloat16)
    weight = _random(50 + rank, K, 12, dtype=torch.bfloat16)
    results = [
        gemm_reduce_scatter(x_TK, weight, None, nodes, flat_scatter, layout="KN") for _ in range(3)
    ]
    same = all(torch.equal(results[0], y) for y in results)
    return [] if same else ["results differ"]


def _in_node_order(rank: int, world_size: int) -> list[float]:
    """Parts 1e8, 1, -1e8, 1 of four nodes: fp32 in node order gives 1, in other orders 0 or 2."""
    nodes = Nodes.of(_group(), 1, partial(GroupOnly, device=torch.device("cpu")))
    x_TK = torch.full((4, 1), (1e8, 1.0, -1e8, 1.0)[rank])
    y_tN = gemm_reduce_scatter(x_TK, torch.ones(1, 3), None, nodes, flat_scatter, layout="KN")
    return list(y_tN.flatten().tolist())


def _refused(rank: int, world_size: int) -> str:
    with pytest.raises(FluxError) as caught:
        Nodes.of(_group(), 2, partial(GroupOnly, device=torch.device("cpu")))
    return str(caught.value)


def _assert_right(by_rank: list[list[str]]) -> None:
    assert not [f"rank {r}: {w}" for r, found in enumerate(by_rank) for w in found]


def test_nodes_give_what_a_flat_group_gives() -> None:
    _assert_right(run_ranks(_with_reference, 4, 2, [6, 13]))


@pytest.mark.full
@pytest.mark.parametrize("ranks_per_node", [2, 1, 4])
def test_nodes_give_what_a_flat_group_gives_for_many_rows(ranks_per_node: int) -> None:
    _assert_right(run_ranks(_with_reference, 4, ranks_per_node, MANY_ROWS))


@pytest.mark.full
@pytest.mark.parametrize("ranks_per_node", [2, 1, 4])
def test_nodes_with_the_chunked_form_inside(ranks_per_node: int) -> None:
    pytest.importorskip("triton")
    _assert_right(run_ranks(_with_chunked, 4, ranks_per_node, MANY_ROWS))


@pytest.mark.full
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_repeats_bitwise(ranks_per_node: int) -> None:
    _assert_right(run_ranks(_repeats, 4, ranks_per_node))


def test_nodes_are_added_in_order() -> None:
    assert run_ranks(_in_node_order, 4) == [[1.0] * 3] * 4


def test_nodes_must_be_full() -> None:
    for error in run_ranks(_refused, 3):
        assert error.startswith("ranks_per_node is 2 and the group has 3 ranks")
