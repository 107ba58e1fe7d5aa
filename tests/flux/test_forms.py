"""The table of forms, and the forms of the backend (gloo here) against the product in one piece."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.errors import FluxError
from megascale.flux.bench.work import engine_tiles
from megascale.flux.bench.world import World
from megascale.flux.forms import FORMS, configs, forms, missing, on_request, views
from megascale.flux.problem import Problem
from megascale.flux.ranks import GroupOnly
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks

K, N = 16, 24


def _nccl_forms(rank: int, world_size: int, rows: list[int]) -> None:
    group = dist.group.WORLD
    assert group is not None
    ranks = GroupOnly(group, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    for m in rows:
        own = slice(*shard_rows(m, world_size, rank))
        x, bias = random(m, K), random(N)
        parts, weights = random(world_size, m, K), random(world_size, N, K)
        gather: Any = forms("ag_gemm")["nccl"]
        several = [weights[0], weights[1]]
        call = {"num_rows": m, "gathered": True}
        outputs, gathered = gather(x[own], several, [bias, None], ranks, layout="NK", **call)
        torch.testing.assert_close(outputs[0], x @ weights[0].t() + bias)
        torch.testing.assert_close(outputs[1], x @ weights[1].t())
        assert torch.equal(gathered, x)
        transposed = weights[0].t().contiguous()
        call = {"num_rows": m, "gathered": False}
        (y,), nothing = gather(x[own], [transposed], [None], ranks, layout="KN", **call)
        torch.testing.assert_close(y, x @ transposed)
        assert nothing is None
        summed = torch.einsum("wmk,wnk->mn", parts, weights) + bias
        mine = (parts[rank], weights[rank].t().contiguous(), bias, ranks)
        torch.testing.assert_close(forms("gemm_rs")["nccl"](*mine, layout="KN"), summed[own])
        torch.testing.assert_close(forms("gemm_ar")["nccl"](*mine, layout="KN"), summed)
        total = parts.sum(0)
        assert torch.equal(forms("all_gather")["nccl"](x[own], ranks, m), x)
        torch.testing.assert_close(forms("reduce_scatter")["nccl"](parts[rank], ranks), total[own])
        before = parts[rank].clone()
        torch.testing.assert_close(forms("all_reduce")["nccl"](parts[rank], ranks), total)
        assert torch.equal(parts[rank], before), "the input is not overwritten"


@pytest.mark.parametrize("world_size", [2, 3])
def test_forms_of_the_backend_with_rows_that_ranks_do_not_divide(world_size: int) -> None:
    run_ranks(_nccl_forms, world_size, [1, 2, 5, 12])


@pytest.mark.parametrize("op", FORMS)
def test_every_form_that_is_here_exists_under_its_name(op: str) -> None:
    here = [name for name in forms(op) if name not in missing(op)]
    assert here[0] == "nccl", "the reference comes first and is always here"
    for name in here:
        place = FORMS[op][name]
        module = import_module(f"megascale.flux.{place.module}")
        assert callable(getattr(module, place.function)), (op, name)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_configurations_differ_and_a_form_for_few_rows_is_for_few_rows(op: Any) -> None:
    few = Problem(op, 64, 8192, 8192, 2, torch.bfloat16, "NK")
    many = Problem(op, 8192, 8192, 8192, 2, torch.bfloat16, "NK")
    for name in forms(op):
        for problem in (few, many):
            found = configs(op, name, problem, (9, 0))
            assert len(set(found)) == len(found), (name, problem)
    assert configs(op, "nccl", many, (9, 0)) == [None], "called without the keyword"
    assert configs(op, "few_rows", few, (9, 0))
    assert configs(op, "few_rows", many, (9, 0)) == []


def test_forms_on_request_are_in_the_table_and_offered_by_name_only() -> None:
    assert {op: on_request(op) for op in FORMS if on_request(op)} == {
        "gemm_rs": ["in_flight"],
        "gemm_ar": ["two_shot_view"],
    }
    offered: Any = World.offered
    world = SimpleNamespace(arena=None)
    assert "in_flight" not in offered(world, "gemm_rs")
    assert "in_flight" in offered(world, "gemm_rs", ("in_flight",))


def test_forms_whose_result_may_stay_in_symmetric_memory_say_so() -> None:
    for op, places in FORMS.items():
        for name in set(places) - set(missing(op)):
            place = places[name]
            form = getattr(import_module(f"megascale.flux.{place.module}"), place.function)
            takes = "view" in signature(form).parameters
            assert views(op, name) == (takes and op == "gemm_ar"), (op, name)


def test_an_operator_that_is_none_is_refused() -> None:
    with pytest.raises(FluxError, match="op is 'moe'; the operators are ag_gemm, gemm_rs, gemm_ar"):
        forms("moe")


def test_the_bench_calls_the_engine_as_it_is() -> None:
    """`Work.own_gemm` launches it alone; its arguments cannot be tried without a GPU."""
    launch = pytest.importorskip("megascale.flux.all_gather_gemm.hopper").launch
    x, weight, out = (torch.empty(1) for _ in range(3))
    signature(launch).bind(x, x, weight, None, out, None, None, None, "NK", 1)
    for op in ("ag_gemm", "gemm_rs"):
        problem = Problem(op, 8192, 8192, 8192, 2, torch.bfloat16, "NK")
        for config in configs(op, "fused", problem, (9, 0)):
            tiles = engine_tiles(config)
            assert (tiles.block_n, tiles.group_m) == (config.block_n, config.group_m)
            assert tiles.chunks == 1
            assert hash(tiles) == hash(engine_tiles(config)), "the engine remembers launches by it"
