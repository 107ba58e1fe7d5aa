"""The test harness itself: results come back in order, failures and silence are reported."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks


def _sum(rank: int, world_size: int, extra: int) -> float:
    value = torch.tensor(float(rank + extra))
    dist.all_reduce(value)
    return value.item()


def _fail(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("planted")


def _hang(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(30)


def test_results_come_back_in_order() -> None:
    assert run_ranks(_sum, 4, 10) == [46.0] * 4


def test_a_failing_rank_is_named() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed(?s:.*)planted"):
        run_ranks(_fail, 2)


def test_a_silent_rank_is_named() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[.*1\] of 2 did not answer"):
        run_ranks(_hang, 2, timeout_s=4)
