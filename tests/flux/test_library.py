"""torch.compile: whole graphs over the operators give what eager calls give, for any rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import (
    AllGatherGemm,
    GemmAllReduce,
    GemmReduceScatter,
    TensorOps,
    column_parallel_linear,
    library,
    row_parallel_linear,
)
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks

pytestmark = pytest.mark.full  # processes and the interpreter: half a minute together

IN, OUT = 6, 5


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _mlp(rank: int, world_size: int, m: int) -> bool:
    """All three operators in one graph, several weights, the gathered input used."""
    group = dist.group.WORLD
    gather, scatter, reduce = AllGatherGemm(group), GemmReduceScatter(group), GemmAllReduce(group)

    def layers(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, bias: Tensor) -> list[Tensor]:
        (a, b), whole = gather(x, [up, gate], [bias, None], num_rows=m, return_gathered=True)
        hidden = torch.relu(a) * b
        return [
            scatter(hidden, down, weight_layout="KN") + 1.0,
            scatter.pair(hidden, down, hidden, down, weight_layout="KN") + 1.0,
            reduce(hidden, down, weight_layout="KN"),
            whole * 2.0,
        ]

    first, end = shard_rows(m, world_size, rank)
    arguments = (
        _random(1, m, IN)[first:end],
        _random(2 + rank, OUT, IN),
        _random(4 + rank, OUT, IN),
        _random(6 + rank, OUT, IN),
        _random(8 + rank, OUT),
    )
    found, wanted = _compiled(layers)(*arguments), layers(*arguments)
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("world_size", "m"), [(1, 4), (2, 4), (3, 7), pytest.param(4, 7, marks=pytest.mark.slow)]
)
def test_a_whole_graph_equals_eager_calls(world_size: int, m: int) -> None:
    assert run_ranks(_mlp, world_size, m) == [True] * world_size


def _dynamic(rank: int, world_size: int) -> list[list[int]]:
    """One graph for several row counts: compiled once."""
    scatter = GemmReduceScatter(dist.group.WORLD)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    function = torch.compile(
        lambda x, w: scatter(x, w) * 1.0, fullgraph=True, backend=backend, dynamic=True
    )
    weight = _random(2, OUT, IN)
    wrong = []
    for m in (15, 8, 30, 61):  # every rank at least two: torch compiles shares of 0 and 1 anew
        x = _random(m, m, IN)
        if not torch.equal(function(x, weight), scatter(x, weight)):
            wrong.append(m)
    return [wrong, [len(graphs)]]


def test_rows_may_be_symbolic() -> None:
    for wrong, (graphs,) in run_ranks(_dynamic, 2):
        assert wrong == []
        assert graphs == 1


def _trains(rank: int, world_size: int) -> bool:
    """Forward and backward of the spread linears in a compiled step."""
    ops = TensorOps.of(dist.group.WORLD)

    def step(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.relu(column_parallel_linear(x, up, None, ops))
        return row_parallel_linear(hidden, down, None, ops).square().sum()

    grads = []
    for function in (step, _compiled(step)):
        leaves = [_random(1 + rank, 2, IN), _random(5 + rank, 4, IN), _random(9 + rank, IN, 4)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        function(*leaves).backward()
        grads.append([leaf.grad for leaf in leaves])
    return all(
        a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=1e-13)
        for a, b in zip(*grads, strict=True)
    )


def test_a_compiled_step_has_the_same_gradients() -> None:
    assert run_ranks(_trains, 2) == [True, True]


def _checked(rank: int, world_size: int) -> list[str]:
    """torch's own checks of a custom op: schema, and fake results like the real ones."""
    group = dist.group.WORLD
    tests = ("test_schema", "test_faketensor")
    for m in (1, 4, 5):
        first, end = shard_rows(m, world_size, rank)
        whole, weight, bias = _random(1, m, IN), _random(2, OUT, IN), _random(3, OUT)
        own = whole[first:end].clone()
        gather = AllGatherGemm(group)
        key = gather._key
        for gathered in (False, True):
            arguments = (own, [weight, weight], [None, bias], key, "NK", m, gathered)
            torch.library.opcheck(library.all_gather_gemm, arguments, test_utils=tests)
        torch.library.opcheck(library.all_gather, (own, key, m), test_utils=tests)
        for op, kind in (
            (library.gemm_reduce_scatter, GemmReduceScatter),
            (library.gemm_all_reduce, GemmAllReduce),
        ):
            operator = kind(group)
            weight_KN = weight.t().contiguous()
            arguments_rs = (whole, weight_KN, bias, operator._key, "KN")
            torch.library.opcheck(op, arguments_rs, test_utils=tests)
        scatter = GemmReduceScatter(group)
        twice = (whole, weight_KN, whole, weight_KN, bias, scatter._key, "KN")
        torch.library.opcheck(library.gemm_reduce_scatter_pair, twice, test_utils=tests)
    with pytest.raises(FluxError) as caught:
        library.gemm_all_reduce(whole, weight, None, "gemm_ar of nobody", "NK")
    return [str(caught.value)]


class _Operator:
    """Of equal settings with others; two are never equal."""


def test_a_graph_calls_the_newest_operator_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before may be of a group that is no more."""
    monkeypatch.setattr(library, "_operators", {})
    first, second, third = _Operator(), _Operator(), _Operator()
    for operator in (first, second, third):
        library.register("key", operator)
    del operator
    assert library._operator("key") is third
    del third
    assert library._operator("key") is second
    del second
    assert library._operator("key") is first
    del first
    with pytest.raises(FluxError, match="has not made or has let go"):
        library._operator("key")


def test_the_ops_keep_torchs_rules() -> None:
    for (message,) in run_ranks(_checked, 3):
        assert message.startswith("a compiled graph calls the flux operator 'gemm_ar of nobody'")
