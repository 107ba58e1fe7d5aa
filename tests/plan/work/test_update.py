"""Bytes of an update, as `optim/` counts them."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from megascale.config import ModelConfig
from megascale.plan.case import Case, Job, Layout, Software
from megascale.plan.work.operations import Collective, MemoryPass
from megascale.plan.work.update import update_bytes_per_element, update_work

MODEL = ModelConfig(preset="gpt3-1.3b")


@pytest.mark.parametrize(
    ("optimizer", "plain", "dtype_bytes", "num_bytes"),
    [
        ("adamw", False, 2, 34),  # `optim/kernel_updates.py`: 4 for the norm, 30 for the update
        ("lamb", False, 2, 46),
        ("adamw", True, 2, 46),  # squares 4, scaling 8, Adam 28, rounding 6
        ("adamw", False, 4, 32),
        ("lamb", True, 2, 90),
    ],
)
def test_bytes_of_an_element(
    optimizer: str, plain: bool, dtype_bytes: int, num_bytes: float
) -> None:
    found = update_bytes_per_element(optimizer, plain=plain, dtype_bytes=dtype_bytes)
    assert found == num_bytes


def work(
    zero: Literal[0, 1, 2, 3], optimizer: Literal["adamw", "lamb"] = "adamw", **layout: Any
) -> tuple[MemoryPass, list[Collective]]:
    case = Case(
        Job(MODEL, 8, 128, optimizer=optimizer), Layout(zero_stage=zero, **layout), Software()
    )
    first, *others = update_work(case, 1e6, num_buckets=3, num_names=20)
    assert isinstance(first, MemoryPass)
    return first, [op for op in others if isinstance(op, Collective)]


def test_the_optimizer_passes_over_a_shard() -> None:
    assert work(1, data=4)[0].num_bytes == 34e6 / 4
    assert work(0, data=4)[0].num_bytes == 34e6
    assert work(1, data=4)[0].kernels == 2 * 2 * 3  # squares and update, two runs a bucket
    assert work(1, "lamb", data=4)[0].kernels == 3 * 2 * 3


def test_norms_are_summed_over_every_axis_that_shares_parameters() -> None:
    _, sums = work(1, data=4, tensor=2, pipeline=2)
    assert [(op.axis, op.num_bytes) for op in sums] == [
        ("data", 160), ("tensor", 160), ("pipeline", 160),
    ]  # fmt: skip
    assert [op.axis for op in work(0, data=4)[1]] == []  # gradients are whole on every data rank
    assert work(1, "lamb", data=4)[1][0].num_bytes == 320  # of weights and updates too
