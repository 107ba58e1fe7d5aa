"""The operators on as many GPUs as there are: values, exactness, every form and configuration.

Many cases share one start of the ranks, which costs 15 s. On one GPU eight virtual ranks stand in
(`test_gpu_virtual.py` has two and four of them, with more shapes).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.arena import Arena
from megascale.flux.forms import configs, missing
from tests.distributed import run_ranks
from tests.flux.gpu_cases import (
    OPS,
    Case,
    Inputs,
    cases,
    inputs,
    not_at_rest,
    poison_slots,
    poisoned_outputs,
    run_form,
    settle,
    wrong,
)
from tests.flux.virtual_ranks import VirtualArena, flags_at_rest, on_all, virtual_arenas, warm_up

FORMS = ("fused", "few_rows", "chunked", "plain", "nccl")
FEW_ROWS = 512  # above it "few_rows" is not offered


def _form_names(case: Case) -> list[str]:
    absent = {*missing(case.op), *(["few_rows"] if case.m > FEW_ROWS else [])}
    return [name for name in FORMS if name not in absent]


def _world_arena() -> Arena:
    assert dist.group.WORLD is not None
    return Arena.of(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))


def _every_form(rank: int, world_size: int) -> list[str]:
    arena = _world_arena()
    arena.reserve(64 << 20)
    failures = []
    with poisoned_outputs():
        for seed, case in enumerate(case for op in OPS for case in cases(op)):
            given = inputs(case, rank, world_size, arena.device, seed)
            for name in _form_names(case):
                poison_slots(arena)
                found, gathered = run_form(name, case, given, arena, gathered=bool(seed % 2))
                problem = wrong(case, found, given)
                if gathered is not None and not torch.equal(gathered, given.gathered):
                    problem += " gathered input differs"
                problem += not_at_rest(arena)
                failures += [f"rank {rank}, {name}, {case}: {problem}"] if problem else []
    return failures


@pytest.mark.multi_gpu
@pytest.mark.timeout(240)
def test_every_form_gives_the_reference_values() -> None:
    found = run_ranks(_every_form, torch.cuda.device_count(), cuda=True, timeout_s=230)
    assert [line for lines in found for line in lines] == []


def _every_configuration(rank: int, world_size: int) -> list[str]:
    arena = _world_arena()
    failures = []
    with poisoned_outputs():
        for op in OPS:
            for seed, m in enumerate((512 * world_size, 512 * world_size + 129, 48)):
                case = Case(op, m, 1032, 520, bias=True)
                given = inputs(case, rank, world_size, arena.device, 1000 + seed)
                for name in _form_names(case):
                    capability = torch.cuda.get_device_capability()
                    found = configs(op, name, case.problem(world_size), capability) or [None]
                    for config in _one_an_engine(found) if m % 512 == 129 else found:
                        poison_slots(arena)
                        problem = _exactness(name, case, given, arena, config)
                        problem += not_at_rest(arena)
                        line = f"rank {rank}, {name}, {config}, {case}: {problem}"
                        failures += [line] if problem else []
    return failures


def _one_an_engine(found: list[Any]) -> list[Any]:
    """The first of each engine: each is a compilation of its own."""
    return list({getattr(c, "engine", None): c for c in reversed(found)}.values())


def _exactness(name: str, case: Case, given: Inputs, arena: Arena, config: Any) -> str:
    """Right, the same bits with other delays, and for fused all-gather those of the GEMM alone."""
    outputs: list[Tensor] = []
    for repeat in range(3):
        if repeat == 1 + arena.rank % 2:
            torch.cuda._sleep(2_000_000)  # a millisecond
        outputs += run_form(name, case, given, arena, config)[0]
    problem = wrong(case, outputs[:1], given)
    if not all(torch.equal(outputs[0], other) for other in outputs[1:]):
        problem += " not the same bits when repeated"
    if case.op == "ag_gemm" and name == "fused":
        alone = _gemm_alone(case, given, config)
        if not torch.equal(outputs[0], alone):
            problem += " not the bits of the GEMM alone"
    return problem


def _gemm_alone(case: Case, given: Inputs, config: Any) -> Tensor:
    """The kernel of the fused form on the gathered input, as one rank."""
    from megascale.flux.all_gather_gemm.launch import _engine

    (arena,) = virtual_arenas(1, 1 << 20)
    x_TK, out = given.gathered, torch.empty(case.m, case.n, dtype=case.dtype, device="cuda")
    with arena.turn(0) as slot:
        _engine(config.engine)(
            x_TK,
            x_TK[None],
            given.weights[0],
            given.biases[0],
            out,
            slot,
            arena,
            config,
            case.layout,
            case.m,
            clear=True,
        )()
    return out


@pytest.mark.multi_gpu
@pytest.mark.timeout(240)
def test_every_configuration_is_exact() -> None:
    found = run_ranks(_every_configuration, torch.cuda.device_count(), cuda=True, timeout_s=230)
    assert [line for lines in found for line in lines] == []


def _same_weight(rank: int, world_size: int) -> list[str]:
    """Each rank computes the rows in another order and reads another shard from x itself."""
    arena = _world_arena()
    failures = []
    for m in (256 * world_size, 256 * world_size + 40):
        case = Case("ag_gemm", m, 512, 512)
        given = inputs(case, rank, world_size, arena.device, 7)
        given.weights = inputs(case, 0, world_size, arena.device, 7).weights
        for name in ("fused", "plain"):
            (y_TN,), _ = run_form(name, case, given, arena)
            of_all = [torch.empty_like(y_TN) for _ in range(world_size)]
            dist.all_gather(of_all, y_TN)
            if not all(torch.equal(of_all[0], other) for other in of_all):
                failures.append(f"{name}, {case}")
    settle()
    return failures


@pytest.mark.multi_gpu
def test_ranks_with_one_weight_get_the_same_bits() -> None:
    world_size = torch.cuda.device_count()
    assert run_ranks(_same_weight, world_size, cuda=True, timeout_s=110) == [[]] * world_size


VIRTUAL = 8
VIRTUAL_CASES = [
    *(Case(op, m, 520, 264, bias=True) for op in OPS for m in (5, 1001, 1024)),
    Case("ag_gemm", 1024, 256, 512, num_weights=2),
]


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in FORMS if name != "nccl"])
def test_eight_virtual_ranks_on_one_gpu(name: str) -> None:
    arenas = virtual_arenas(VIRTUAL, 4 << 20)
    spare = 4  # SMs: a copy inside one device may be a kernel
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for arena in arenas:
        arena.num_sms = (sms - spare) // VIRTUAL
    for seed, case in enumerate(VIRTUAL_CASES):
        if name not in _form_names(case):
            continue
        given = [inputs(case, r, VIRTUAL, arenas[0].device, seed) for r in range(VIRTUAL)]

        def call(
            rank: int, arena: VirtualArena, case: Case = case, given: list[Inputs] = given
        ) -> list[Tensor]:
            return run_form(name, case, given[rank], arena)[0]

        warm_up(arenas, call)
        for rank, found in enumerate(on_all(arenas, call)):
            assert wrong(case, found, given[rank]) == "", (case, rank)
        assert flags_at_rest(arenas)
