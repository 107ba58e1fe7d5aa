"""GEMM + reduce-scatter reduced in flight, on GPUs: values, bits that repeat, one shard of memory.

On one GPU with virtual ranks, and on as many GPUs as there are with real ones.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux import GemmReduceScatter
from megascale.flux.arena import Arena
from megascale.flux.forms import configs
from tests.distributed import run_ranks
from tests.flux.gpu_calls import MILLISECOND, SCALES, Delays, Verdict
from tests.flux.gpu_cases import (
    Case,
    Inputs,
    inputs,
    not_at_rest,
    poison_slots,
    poisoned_outputs,
    run_form,
    settle,
    wrong,
)
from tests.flux.virtual_ranks import VirtualArena, flags_at_rest, on_all, virtual_arenas, warm_up

NAME = "in_flight"
CASES = [
    Case("gemm_rs", 1, 256, 512),  # most ranks have no rows
    Case("gemm_rs", 5, 776, 520, bias=True),
    Case("gemm_rs", 127, 264, 512, torch.float16, "KN"),
    Case("gemm_rs", 512, 768, 512, bias=True),
    Case("gemm_rs", 1001, 776, 520, torch.float16, "KN", bias=True),  # overhang in every direction
    Case("gemm_rs", 2050, 1032, 264),
    Case("gemm_rs", 4096, 2048, 512),  # several tiles a program
]


def _configs(case: Case, world_size: int) -> list[Any]:
    problem = case.problem(world_size)
    return configs("gemm_rs", NAME, problem, torch.cuda.get_device_capability())


def _shard_bytes(case: Case, world_size: int) -> int:
    return -(-case.m // world_size) * case.n * case.dtype.itemsize


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_virtual_ranks_on_one_gpu(world_size: int) -> None:
    """Every configuration, in slots of one shard that hold NaN at first."""
    failures = []
    for seed, case in enumerate(CASES):
        given = [inputs(case, r, world_size, torch.device("cuda"), seed) for r in range(world_size)]
        for config in _configs(case, world_size):
            arenas = virtual_arenas(world_size, max(256, _shard_bytes(case, world_size)))
            failures += [f"{case}, {config}: {w}" for w in _repeated(case, given, arenas, config)]
    assert failures == []


def _repeated(
    case: Case, given: list[Inputs], arenas: list[VirtualArena], config: Any
) -> list[str]:
    def call(rank: int, arena: VirtualArena) -> Tensor:
        with poisoned_outputs():
            return run_form(NAME, case, given[rank], arena, config)[0][0]

    warm_up(arenas, call)
    first: list[Tensor] = []
    failures = []
    for turn in range(6):  # every slot, and again
        found = on_all(arenas, call)
        first = first or found
        for rank, y in enumerate(found):
            if problem := wrong(case, [y], given[rank]):
                failures.append(f"call {turn}, rank {rank}: {problem}")
            if not torch.equal(y, first[rank]):
                failures.append(f"call {turn}, rank {rank}: not the bits of the first")
        if not flags_at_rest(arenas):
            failures.append(f"call {turn} leaves flags set")
    return failures


@pytest.mark.gpu
def test_two_ranks_get_the_bits_of_the_fused_form() -> None:
    """Nothing is added in memory there. Calls of both forms go through the same slots in turn."""
    for seed, case in enumerate(CASES):
        given = [inputs(case, r, 2, torch.device("cuda"), seed) for r in range(2)]
        tiles = [c for c in _configs(case, 2) if c.engine == "hopper"][:1] or _configs(case, 2)[:1]
        for config in tiles:
            same = _fused_of(config)
            arenas = virtual_arenas(2, 2 * max(256, _shard_bytes(case, 2)))

            def both(
                rank: int,
                arena: VirtualArena,
                case: Case = case,
                given: list[Inputs] = given,
                config: Any = config,
                same: Any = same,
            ) -> tuple[Tensor, Tensor]:
                (y,), _ = run_form(NAME, case, given[rank], arena, config)
                (wanted,), _ = run_form("fused", case, given[rank], arena, same)
                return y, wanted

            warm_up(arenas, both)
            for _ in range(3):
                for rank, (y, wanted) in enumerate(on_all(arenas, both)):
                    assert torch.equal(y, wanted), (case, config, rank)
            assert flags_at_rest(arenas)


def _fused_of(config: Any) -> Any:
    """The fused form's configuration of the same tiles."""
    from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter

    names = ("engine", "block_m", "block_n", "block_k", "group_m", "num_stages", "num_warps", "tma")
    return FusedReduceScatter(**{name: getattr(config, name) for name in names})


def _world_arena() -> Arena:
    assert dist.group.WORLD is not None
    return Arena.of(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))


def _every_configuration(rank: int, world_size: int) -> list[str]:
    arena = _world_arena()
    failures = []
    with poisoned_outputs():
        for seed, case in enumerate(CASES):
            given = inputs(case, rank, world_size, arena.device, seed)
            for config in _configs(case, world_size):
                poison_slots(arena)
                outputs: list[Tensor] = []
                for repeat in range(4):
                    if repeat == 1 + rank % 3:
                        torch.cuda._sleep(MILLISECOND)
                    outputs += run_form(NAME, case, given, arena, config)[0]
                problem = wrong(case, outputs[:1], given)
                if not all(torch.equal(outputs[0], other) for other in outputs[1:]):
                    problem += " not the same bits when repeated"
                problem += not_at_rest(arena)
                failures += [f"rank {rank}, {config}, {case}: {problem}"] if problem else []
    return failures


@pytest.mark.multi_gpu
@pytest.mark.timeout(240)
def test_every_configuration_on_all_gpus() -> None:
    found = run_ranks(_every_configuration, torch.cuda.device_count(), cuda=True, timeout_s=230)
    assert [line for lines in found for line in lines] == []


def _operators() -> list[Any]:
    modes: list[dict[str, Any]] = [
        {"mode": "fused", "in_flight": True},
        {"mode": "fused"},
        {"mode": "chunked"},
    ]
    return [GemmReduceScatter(dist.group.WORLD, **options) for options in modes]


def _long_run(rank: int, world_size: int) -> list[str]:
    """Calls of changing sizes beside those of other forms, with late ranks; then graphs."""
    arena = _world_arena()
    operators = _operators()
    table = []
    for seed, m in enumerate((4096, 1000, 512 * world_size, 129, 128 * world_size + 1, 300, 1)):
        case = Case("gemm_rs", m, 1032, 264)
        table.append((case, inputs(case, rank, world_size, arena.device, 50 + seed)))
    failures = []
    for case, given in table:
        for operator in operators:
            problem = wrong(case, [operator(given.x, given.weights[0])], given)
            failures += [f"rank {rank}, {operator}, {case}: {problem}"] if problem else []
    shared, delays, verdict = random.Random(5), Delays(rank), Verdict()
    for number in range(400):
        _, given = shared.choice(table)
        operator = operators[0] if number % 2 else shared.choice(operators)
        scale = shared.choice(SCALES)
        delays.maybe()
        verdict.check(operator(given.x * scale, given.weights[0]), given.wanted[0], scale)
    settle()
    failures += verdict.failures(f"rank {rank}, eager")
    failures += _replayed(rank, operators, table)
    left = not_at_rest(arena)
    return failures + ([f"rank {rank}: {left}"] if left else [])


def _replayed(rank: int, operators: list[Any], table: list[tuple[Case, Inputs]]) -> list[str]:
    """A graph of five calls, replayed with other inputs, eager calls between."""
    given = [g for _, g in table[:5]]
    xs = [g.x.clone() for g in given]
    graph, results = torch.cuda.CUDAGraph(), []
    settle()
    with torch.cuda.graph(graph):
        for x, g in zip(xs, given, strict=True):
            results.append(operators[0](x, g.weights[0]))
    delays, verdict, shared = Delays(rank), Verdict(), random.Random(9)
    for number in range(60):
        scale = shared.choice(SCALES)
        for x, g in zip(xs, given, strict=True):
            torch.mul(g.x, scale, out=x)
        delays.maybe()
        graph.replay()
        for y, g in zip(results, given, strict=True):
            verdict.check(y, g.wanted[0], scale)
        if number % 3 == 0:
            verdict.check(
                operators[number % 2](given[0].x, given[0].weights[0]), given[0].wanted[0], 1
            )
    settle()
    return verdict.failures(f"rank {rank}, graph")


@pytest.mark.multi_gpu
@pytest.mark.timeout(240)
def test_a_long_run_and_graphs_on_all_gpus() -> None:
    found = run_ranks(_long_run, torch.cuda.device_count(), cuda=True, timeout_s=230)
    assert [line for lines in found for line in lines] == []


def _memory(rank: int, world_size: int) -> list[int]:
    """Capacity of a slot after a call of each form, in shards; the rest is rounding."""
    arena, case = _world_arena(), Case("gemm_rs", 8192 * world_size, 2048, 64)
    given = inputs(replace(case, m=8), rank, world_size, arena.device, 1)
    x = given.x.new_zeros(case.m, case.k)
    weight = given.x.new_zeros(case.n, case.k)
    capacities = []
    for name in (NAME, "fused"):
        run_form(name, case, replace(given, x=x, weights=[weight], biases=[None]), arena)
        capacities.append(arena.capacity // _shard_bytes(case, world_size))
    settle()
    return capacities


@pytest.mark.multi_gpu
def test_symmetric_memory_is_one_shard() -> None:
    world_size = torch.cuda.device_count()
    found = run_ranks(_memory, world_size, cuda=True, timeout_s=110)
    assert found == [[1, world_size]] * world_size
