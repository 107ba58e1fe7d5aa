"""How a transfer meets a product, by hand on a machine of round numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan.case import TensorOverlap
from megascale.plan.overlap import Pricer, side_by_side
from megascale.plan.prices import Spent
from megascale.plan.work.operations import (
    Attention,
    Collective,
    Direction,
    Gemm,
    MemoryPass,
    Transfer,
)
from megascale.topology import Mesh
from tests.plan.machines import RoundDevice, RoundMachine

# one second alone: 2 x 1024 x 1000 x depth FLOPs at 1e12
GEMM = Gemm("fc1", 1024, 1000, 500_000_000 // 1024, Direction.FORWARD)
GATHER = Collective("gather", Transfer.ALL_GATHER, 0.8e9, "tensor", under="fc1")  # 0.4 s of 2 ranks
SECONDS = st.floats(1e-6, 10.0)
FACTORS = st.floats(1.0, 2.0)  # beyond, side by side may be slower than one by one


def pricer(overlap: TensorOverlap, machine: RoundMachine | None = None, **more: Any) -> Pricer:
    return Pricer((machine or RoundMachine()).cluster, Mesh(tensor=2), overlap, **more)


def test_side_by_side_slows_only_while_both_run() -> None:
    """A transfer of 1 s beside compute of 4 s: 1 s in which compute does 0.8 s of work."""
    assert side_by_side(4.0, 1.0, sigma=1.25, rho=1.0) == pytest.approx(4.2)
    assert side_by_side(1.0, 4.0, sigma=1.0, rho=1.25) == pytest.approx(4.2)
    assert side_by_side(1.0, 1.0, sigma=1.5, rho=1.5) == pytest.approx(1.5)


@given(SECONDS, SECONDS, FACTORS, FACTORS)
def test_side_by_side_is_between_the_longer_and_both(
    compute_s: float, transfer_s: float, sigma: float, rho: float
) -> None:
    both = side_by_side(compute_s, transfer_s, sigma, rho)
    assert both >= max(compute_s, transfer_s) * (1 - 1e-12)
    assert both <= max(compute_s * sigma, transfer_s * rho) * (1 + 1e-12)
    assert side_by_side(compute_s * 1.1, transfer_s, sigma, rho) >= both * (1 - 1e-12)
    assert side_by_side(compute_s, transfer_s * 1.1, sigma, rho) >= both * (1 - 1e-12)


def test_parts_of_time_by_kind() -> None:
    attention = Attention("attention", 1, 1000, 1, 1, 250, None, False)  # 1e9 FLOPs
    work = (GEMM, attention, MemoryPass("norm", 2e9))
    found = pricer("none").spent(work)
    assert found.gemm_s == pytest.approx(GEMM.flops / 1e12)
    assert found.attention_s == pytest.approx(1e-3)
    assert found.memory_s == 2.0
    assert (found.tensor_s, found.launch_s) == (0.0, 0.0)


def test_its_own_operand_hides_only_where_it_is_cut() -> None:
    work = (GATHER, GEMM)
    alone = GEMM.flops / 1e12
    modes: tuple[TensorOverlap, ...] = ("none", "backward")
    for overlap in modes:
        found = pricer(overlap).spent(work)
        assert found == Spent(gemm_s=alone, tensor_s=0.4)
    chunked = pricer("chunked", copy_engines=False).spent(work)
    assert chunked.tensor_s == pytest.approx(0.4 / 8)  # eight chunks, the first one's gather
    copies = pricer("chunked").spent(work)
    assert copies.tensor_s == pytest.approx(0.0)
    fused = pricer("fused").spent(work)
    assert fused.tensor_s == pytest.approx(0.4 * 128 * 2 / 1024)  # a tile of each rank


def test_chunks_are_as_many_as_pay() -> None:
    """With 0.1 s of latency eight transfers would be longer than the product: four."""
    slow = RoundMachine(latency_s=0.1)
    found = pricer("chunked", slow, copy_engines=False).spent((GATHER, GEMM))
    assert found.tensor_s == pytest.approx(0.1 + 0.4 / 4)
    found = pricer("chunked", RoundMachine(latency_s=1.0), copy_engines=False).spent((GATHER, GEMM))
    assert found.tensor_s == pytest.approx(1.4)  # one of them: one after the other


def test_copied_parts_are_summed_at_the_end() -> None:
    """Both ranks' parts of the own half read, the sum written: 1.5 times the whole."""
    reduce = Collective("reduce", Transfer.REDUCE_SCATTER, 0.8e9, "tensor", under="fc1")
    found = pricer("chunked", RoundMachine(memory=1e11)).spent((GEMM, reduce))
    assert found.tensor_s == pytest.approx(1.5 * 0.8e9 / 1e11)


def test_what_is_independent_hides_as_it_is() -> None:
    beside = Collective("again", Transfer.ALL_GATHER, 0.8e9, "tensor", beside="fc1")
    assert pricer("none").spent((beside, GEMM)).tensor_s == pytest.approx(0.4)
    slowed = RoundMachine(sigma=1.25)
    found = pricer("backward", slowed).spent((beside, GEMM))
    assert found.tensor_s == pytest.approx(0.4 * (1 - 1 / 1.25))


def test_parts_share_products_to_hide_behind() -> None:
    """A reduction of the inputs' half behind a product of the weights'; alone it is exposed."""
    reduce = Collective("r", Transfer.REDUCE_SCATTER, 0.8e9, "tensor", "fc1", beside="w")
    weight = Gemm("w", 1024, 1000, GEMM.depth, Direction.WGRAD)
    together = pricer("backward").spent_of_parts(((GEMM, reduce), (weight,)))
    assert [part.tensor_s for part in together] == pytest.approx([0.0, 0.0])
    assert pricer("backward").spent((GEMM, reduce)).tensor_s == pytest.approx(0.4)


def test_collectives_prefer_a_product_that_is_independent_of_them() -> None:
    """No chunk of them is exposed there; copies hide either way."""
    reduce = Collective("r", Transfer.REDUCE_SCATTER, 0.8e9, "tensor", "fc1", beside="w")
    weight = Gemm("w", 1024, 1000, GEMM.depth, Direction.WGRAD)
    chunked = pricer("chunked", copy_engines=False)
    assert sum(
        part.tensor_s for part in chunked.spent_of_parts(((GEMM, reduce), (weight,)))
    ) == pytest.approx(0.0)


def test_joined_weight_gradients_are_shared() -> None:
    weight = Gemm("w", 1024, 1000, 4 * GEMM.depth, Direction.WGRAD)
    assert pricer("none").spent((weight,), joined=4).gemm_s == pytest.approx(GEMM.flops / 1e12)


def test_a_slow_host_is_seen() -> None:
    """Ten kernels at 1 ms a launch for 2 ms of work: 8 ms of waiting."""
    machine = RoundMachine(device=RoundDevice(launch_s=1e-3))
    work = (MemoryPass("norm", 2e6, kernels=10),)
    assert pricer("none", machine).spent(work).launch_s == pytest.approx(8e-3)
    assert pricer("none").spent(work).launch_s == 0.0


@given(
    depth=st.integers(1, 10**6),
    num_bytes=st.floats(1.0, 1e10),
    latency_s=st.floats(0.0, 0.1),
    sigma=FACTORS,
    rho=FACTORS,
    copies=st.floats(1e8, 1e10),
)
def test_no_form_is_slower_than_one_after_the_other(
    depth: int, num_bytes: float, latency_s: float, sigma: float, rho: float, copies: float
) -> None:
    machine = RoundMachine(latency_s=latency_s, sigma=sigma, rho=rho, copies=copies)
    gemm = Gemm("fc1", 4096, 1000, depth, Direction.DGRAD)
    under = Collective("u", Transfer.REDUCE_SCATTER, num_bytes, "tensor", "fc1", "fc1.wgrad")
    beside = Collective("b", Transfer.ALL_GATHER, num_bytes, "tensor", beside="fc1")
    work = (beside, gemm, under)
    whole_s = pricer("none", machine).spent(work).total_s
    modes: tuple[TensorOverlap, ...] = ("backward", "chunked", "fused")
    for overlap in modes:
        found = pricer(overlap, machine).spent(work)
        assert found.total_s <= whole_s * (1 + 1e-9)
        assert found.gemm_s == gemm.flops / 1e12
