"""Configurations of the form "fused": what is offered to the tuner, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megascale.errors import FluxError
from megascale.flux.all_gather_gemm.config import FusedAllGather
from megascale.flux.all_gather_gemm.config import candidates as gather_candidates
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.gemm_config import HOPPER, GemmConfig
from megascale.flux.gemm_reduce_scatter.config import candidates as scatter_candidates
from megascale.flux.gemm_reduce_scatter.config import num_flags
from megascale.flux.problem import Op, Problem

AMPERE, BLACKWELL = (8, 0), (10, 0)
BOTH: list[tuple[Op, Callable[..., list[Any]]]] = [
    ("ag_gemm", gather_candidates),
    ("gemm_rs", scatter_candidates),
]


def _problem(op: Op, m: int, n: int = 12288, k: int = 12288, world_size: int = 2) -> Problem:
    return Problem(op, m, n, k, world_size, torch.bfloat16, "NK")


@pytest.mark.parametrize(("op", "candidates"), BOTH)
@pytest.mark.parametrize("m", [1, 64, 1000, 8192, 32768])
def test_candidates_differ_and_suit_the_device(
    op: Op, candidates: Callable[..., list[Any]], m: int
) -> None:
    for capability in (AMPERE, HOPPER, BLACKWELL):
        found = candidates(_problem(op, m), capability)
        assert 1 < len(found) == len(set(found)) <= 12
        assert any(c.engine == "portable" for c in found)
        assert capability == HOPPER or all(c.engine == "portable" for c in found)
        assert capability >= HOPPER or not any(c.tma for c in found)
    odd = candidates(_problem(op, m, n=1001), HOPPER)
    assert all(c.engine == "portable" for c in odd)  # rows of 16 bytes are that engine's condition


def test_the_default_on_hopper_is_its_engine_where_tiles_are_full() -> None:
    for op, candidates in BOTH:
        assert candidates(_problem(op, 8192))[0].engine == "hopper"
        assert candidates(_problem(op, 64))[0].engine == "portable"


def test_a_shard_is_cut_only_where_its_pieces_stay_long() -> None:
    chunks = {m: {c.chunks for c in gather_candidates(_problem("ag_gemm", m))} for m in (512, 4096)}
    assert chunks == {512: {1}, 4096: {1, 2, 4}}


def test_tiles_that_need_more_flags_than_there_are_are_not_offered() -> None:
    problem = _problem("gemm_rs", 1 << 20, n=28672)
    found = scatter_candidates(problem)
    counts = [num_flags(problem.rows_a_rank, problem.n, 2, c) for c in found]
    assert 0 < len(found) < len(scatter_candidates(_problem("gemm_rs", 8192)))
    assert max(counts) <= NUM_FLAGS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GemmConfig(block_m=96), "powers of two"),
        (lambda: GemmConfig(block_k=8), "at least 16"),
        (lambda: GemmConfig(num_stages=0), "at least 1"),
        (lambda: FusedAllGather(chunks=0), "chunks must be at least 1, got 0"),
    ],
)
def test_impossible_tiles_are_refused(make: Callable[[], GemmConfig], message: str) -> None:
    with pytest.raises(FluxError, match=message):
        make()
