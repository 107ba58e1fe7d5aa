"""The form "few_rows" of the three operators: kernels interpreted, on ranks that share an arena."""

from __future__ import annotations

from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.few_rows.config import FewRows, block_m_of, candidates, programs_an_sm
from megascale.flux.problem import Problem
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks
from tests.flux.ahead_of_time import TARGETS, ptx
from tests.flux.shared_arena import SharedArena, interpret_kernels

pytestmark = pytest.mark.full  # processes and the interpreter: half a minute together


MORE = [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, 8)]


class Case(NamedTuple):
    """One call. num_sms and splits say how works meet programs; in_band how pieces travel."""

    m: int
    n: int
    k: int
    splits: int = 1
    num_sms: int = 1
    layout: Any = "NK"
    bias: bool = False
    in_band: bool = True
    dtype: torch.dtype = torch.float16

    @property
    def config(self) -> FewRows:
        return FewRows(64, 32, 2, 4, self.splits, 64, self.in_band)


FEW = [
    Case(1, 72, 40, bias=True),  # fewer rows than ranks, ends of N and K inside a block
    Case(5, 64, 64, layout="KN", num_sms=2),
    Case(4, 136, 72, splits=2, num_sms=3, in_band=False),
    Case(3, 72, 32, splits=4, bias=True, layout="KN", dtype=torch.bfloat16),  # splits without work
]
MANY = [
    Case(17, 200, 104, num_sms=2, bias=True),
    Case(2, 64, 136, splits=2, num_sms=2),
    Case(6, 136, 64, in_band=False, layout="KN", bias=True),
    Case(130, 72, 40, num_sms=3),  # two tile rows
    Case(130, 64, 64, splits=2, in_band=False, dtype=torch.bfloat16),
    Case(7, 328, 48, splits=4, num_sms=5),
]


class _Limits:
    """What of an arena a call depends on."""

    deadline_ns, num_sms = 0, 132


def test_a_call_is_of_its_deadline_and_its_programs() -> None:
    from megascale.flux.few_rows.launch import call_of

    arena: Any = _Limits()
    made: list[Any] = []

    def make() -> Any:
        made.append((arena.deadline_ns, arena.num_sms))
        return made[-1]

    limits = [(0, 132), (5, 132), (5, 100), (0, 100)]
    for _again in range(2):
        for arena.deadline_ns, arena.num_sms in limits:
            call: Any = call_of(arena, ("of one problem",), make)
            assert call == (arena.deadline_ns, arena.num_sms)
    assert made == limits


def _random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _with_zeros(weight_NK: Tensor) -> Tensor:
    """Rows of zeros: products of both signs of zero, the words that in-band must not send."""
    weight_NK[::3] = 0.0
    return weight_NK


def _stored(weight_NK: Tensor, layout: str) -> Tensor:
    return weight_NK if layout == "NK" else weight_NK.t().contiguous()


def _near(found: Tensor, wanted: Tensor, magnitude: float) -> None:
    """Within a few roundings of values of this magnitude (the interpreter cuts bf16 off)."""
    ulp = 2.0 ** (-7 if found.dtype == torch.bfloat16 else -10)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=2 * ulp, atol=2 * ulp * magnitude)


def _sums(rank: int, world_size: int, cases: list[Case], scatter: bool) -> list[list[int]]:
    interpret_kernels()
    from megascale.flux.gemm_all_reduce.few_rows import gemm_all_reduce
    from megascale.flux.gemm_reduce_scatter.few_rows import gemm_reduce_scatter

    arena, bits = _arena(), []
    times = 2 if world_size < 3 else 1
    for seed, case in enumerate(cases):
        arena._num_sms = case.num_sms
        x = [_random(10 * seed + r, case.m, case.k, dtype=case.dtype) for r in range(world_size)]
        w = [_random(99 * seed + r, case.n, case.k, dtype=case.dtype) for r in range(world_size)]
        w = [_with_zeros(weight_NK) for weight_NK in w]
        bias = _random(7, case.n, dtype=case.dtype) if case.bias else None
        wanted = sum(a.double() @ b.double().t() for a, b in zip(x, w, strict=True))
        assert isinstance(wanted, Tensor)
        form = gemm_reduce_scatter if scatter else gemm_all_reduce
        for _again in range(times):
            y = form(
                x[rank], _stored(w[rank], case.layout), bias, arena,
                layout=case.layout, config=case.config,
            )  # fmt: skip
            if not scatter:
                bits.append(y.view(torch.int16).flatten().tolist())
            first, end = shard_rows(case.m, world_size, rank) if scatter else (0, case.m)
            with_bias = wanted if bias is None else wanted + bias.double()
            _near(y, with_bias[first:end], magnitude=case.k**0.5)
        assert scatter or times == 1 or bits[-1] == bits[-2], case
    if world_size > 1:
        assert arena.turns == times * len(cases)
    return bits


def _arena() -> SharedArena:
    assert dist.group.WORLD is not None
    return SharedArena(dist.group.WORLD, 1 << 19)


@pytest.mark.parametrize("world_size", [1, 2, 3, *MORE])
@pytest.mark.parametrize("scatter", [False, True])
def test_tiles_are_summed_over_ranks(world_size: int, scatter: bool) -> None:
    cases = FEW[:2] if world_size == 3 else FEW
    first, *others = run_ranks(_sums, world_size, cases, scatter, timeout_s=110)
    assert scatter or first
    for other in others:  # all-reduce: the same bits everywhere
        assert other == first


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "scatter"),
    [
        (2, True),
        (3, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_tiles_of_many_shapes_are_summed(world_size: int, scatter: bool) -> None:
    run_ranks(_sums, world_size, MANY, scatter, timeout_s=110)


def _gathers(rank: int, world_size: int, cases: list[Case]) -> None:
    interpret_kernels()
    from megascale.flux.all_gather_gemm.few_rows import all_gather_gemm

    arena, several = _arena(), cycle([False, True])
    for seed, case in enumerate(cases):
        arena._num_sms = case.num_sms
        x_TK = _random(10 * seed, case.m, case.k, dtype=case.dtype)
        first, end = shard_rows(case.m, world_size, rank)
        columns = [case.n, 40] if next(several) else [case.n]
        weights = [_random(seed + n, n, case.k, dtype=case.dtype) for n in columns]
        biases = [_random(n, n, dtype=case.dtype) if case.bias else None for n in columns]
        outputs, gathered = all_gather_gemm(
            x_TK[first:end], [_stored(w, case.layout) for w in weights], biases, arena,
            layout=case.layout, num_rows=case.m, gathered=True, config=case.config,
        )  # fmt: skip
        assert gathered is not None
        assert torch.equal(gathered, x_TK), case
        for y_TN, w, b in zip(outputs, weights, biases, strict=True):
            wanted = x_TK.double() @ w.double().t()
            _near(y_TN, wanted if b is None else wanted + b.double(), magnitude=case.k**0.5)
        assert not arena.done.any()


@pytest.mark.parametrize("world_size", [1, 2, 3, *MORE])
def test_rows_are_gathered_and_multiplied(world_size: int) -> None:
    run_ranks(_gathers, world_size, FEW[:2] if world_size == 3 else FEW, timeout_s=110)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_shapes_are_gathered_and_multiplied(world_size: int) -> None:
    run_ranks(_gathers, world_size, MANY, timeout_s=110)


def _alternating(rank: int, world_size: int) -> None:
    """Three operators in turns, with their default configurations, ranks out of step."""
    interpret_kernels()
    from megascale.flux.all_gather_gemm.few_rows import all_gather_gemm
    from megascale.flux.gemm_all_reduce.few_rows import gemm_all_reduce
    from megascale.flux.gemm_reduce_scatter.few_rows import gemm_reduce_scatter

    arena = SharedArena(dist.group.WORLD, 64, jitter_s=0.003)  # type: ignore[arg-type] # grows
    for call in range(5):
        m, n, k = 2 + call, 64, 128
        x_TK = [_random(call + 10 * r, m, k, dtype=torch.float16) for r in range(world_size)]
        w_NK = _random(call, n, k, dtype=torch.float16)
        first, end = shard_rows(m, world_size, rank)
        y_TN = gemm_all_reduce(x_TK[rank], w_NK, None, arena, layout="NK")
        y_tN = gemm_reduce_scatter(x_TK[rank], w_NK, None, arena, layout="NK")
        assert torch.equal(y_tN, y_TN[first:end])
        summed_TK = torch.stack(x_TK).double().sum(0)
        _near(y_TN, summed_TK @ w_NK.double().t(), magnitude=k**0.5)
        (z_TN,), none = all_gather_gemm(
            x_TK[0][first:end], [w_NK], [None], arena, layout="NK", num_rows=m
        )
        assert none is None
        _near(z_TN, x_TK[0].double() @ w_NK.double().t(), magnitude=k**0.5)


@pytest.mark.full
def test_operators_alternate() -> None:
    run_ranks(_alternating, 2, timeout_s=110)


LLAMA = [(n, k) for n in (8192, 10240, 28672) for k in (4096, 8192, 14336)]
GPT3 = [(12288, 24576), (24576, 12288)]


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_candidates_fit_the_device_and_fill_it(op: Any, capability: tuple[int, int]) -> None:
    for n, k in LLAMA + GPT3:
        for m in (1, 16, 64, 128, 512):
            found = candidates(Problem(op, m, n, k, 2, torch.bfloat16, "NK"), capability)
            assert len(set(found)) == len(found) >= 3
            for config in found:
                assert programs_an_sm(config, m, capability) >= 1
            best = found[0]
            works = -(-m // block_m_of(m)) * -(-n // best.block_n) * best.splits
            assert works >= 80, (m, n, k, best)


def test_a_configuration_that_no_kernel_takes_is_refused() -> None:
    for wrong in (
        {"block_n": 96},
        {"block_n": 32},
        {"splits": 8},
        {"splits": 3},
        {"prefetch_k": 3},
    ):
        with pytest.raises(FluxError) as caught:
            FewRows(**wrong)  # type: ignore[arg-type] # wrong values
        assert next(iter(wrong)) in str(caught.value)


def _kernels() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    from megascale.flux.few_rows.gathered.kernel import gather_gemm_kernel
    from megascale.flux.few_rows.summed.kernel import gemm_sum_kernel

    shape = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "SPLITS": 1, "NK": True}
    wide = {**shape, "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "SPLITS": 2, "NK": False}
    sums = {"SCATTER": False, "IN_BAND": True}
    gather = {"GATHER": True, "BLOCK_X": 2048, "BLOCK_F": 64, "PREFETCH_K": 512}
    return [
        (gemm_sum_kernel, {**shape, **sums}, {"num_stages": 5}),
        (gemm_sum_kernel, {**wide, **sums, "SCATTER": True}, {"num_stages": 4}),
        (gemm_sum_kernel, {**wide, **sums, "IN_BAND": False}, {"num_stages": 4}),
        (gather_gemm_kernel, {**shape, **gather}, {"num_stages": 5}),
        (gather_gemm_kernel, {**wide, **gather}, {"num_stages": 4}),
    ]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("case", range(5))
def test_kernels_compile_to_wide_accesses_and_tensor_cores(case: int, capability: int) -> None:
    kernel, constants, options = _kernels()[case]
    common = {"RANK": 1, "WORLD": 4, "HAS_BIAS": True, "EVEN_K": True, "EVEN_N": True}
    constants = {**constants, **common, "BLOCK_W": 4, "DEADLINE_NS": 0}
    phases = ("PUSH", "MULTIPLY", "COLLECT")
    constants |= {name: True for name in phases if name in kernel.arg_names}
    types = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), "*bf16:16")
    types |= dict.fromkeys(("data_ptrs", "flag_ptrs", "report_ptr"), "*i64:16")
    types |= dict.fromkeys(("tickets_ptr", "done_ptr"), "*i32:16")
    types |= dict.fromkeys(("columns", "k", "share", "total", "part", "partials"), "i32:16")
    types |= dict.fromkeys(("rows", "tiles_m", "works", "pushers", "blocks"), "i32")
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    found = ptx(kernel, types, constants, capability, **options)
    assert ("wgmma.mma_async" in found) == (capability == 90)
    assert ("mma.sync.aligned.m16n8k16" in found) == (capability == 80)
    assert "st.global.v4.b32" in found
    copies = [x for x in found.splitlines() if "cp.async.cg.shared.global" in x]
    assert copies
    assert all("0x10" in x for x in copies), copies[0]
    assert not [x for x in found.splitlines() if "st.global.b16" in x]
    debug = ptx(kernel, types, {**constants, "DEADLINE_NS": 1}, capability, **options)
    assert ("trap;" in found, "trap;" in debug) == (False, True)
    if "IN_BAND" in constants:
        assert ("ld.volatile.global.v4.b32" in found) == constants["IN_BAND"]
    else:
        assert "prefetch.global.L2" in found
