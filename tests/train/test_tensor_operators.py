"""A run's layout and machine decide the form of the operators, said once with the reason."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megascale.config import ParallelismConfig
from megascale.errors import ConfigError
from megascale.parallel.groups import create_groups
from megascale.topology import Mesh
from megascale.train import tensor_operators
from tests.distributed import run_ranks


def _made(
    rank: int, world_size: int, tensor: int, settings: dict[str, Any], kernels: bool
) -> tuple[str, str, bool, int]:
    """(what was logged, mode, spin, reserve) of this rank's operators."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    tensor_operators.logger.addHandler(handler)
    tensor_operators.logger.setLevel(logging.INFO)
    if kernels:
        vars(tensor_operators)["why_not_fused"] = lambda _group, _device: None
    mesh = Mesh(tensor=tensor, data=world_size // tensor, pipeline=1)
    groups = create_groups(mesh, tied_embeddings=False, timeout_s=60)
    par = ParallelismConfig(tensor_parallel_size=tensor, **settings)
    try:
        ops = tensor_operators.tensor_operators(par, groups, torch.device("cpu"))
    except ConfigError as error:
        return str(error), "", False, 0
    operator = ops.gemm_reduce_scatter
    assert operator.group is groups.tensor
    used = operator.settings
    return "\n".join(lines), used.mode, used.spin, used.reserve_sms


@pytest.mark.parametrize(
    ("world_size", "settings", "kernels", "wanted"),
    [
        (
            2,
            {},
            False,
            ("reference (this rank computes on cpu; the kernels need CUDA", "reference", True, 0),
        ),
        (2, {"flux": "reference"}, True, ("reference (asked for)", "reference", True, 0)),
        (2, {}, True, ("auto (the fastest for each shape)", "auto", True, 0)),
        (4, {}, True, ("chunked (NCCL transfers may be pending", "auto", False, 0)),
        (4, {"flux": "fused", "flux_reserve_sms": 8}, True, ("fused (ask", "fused", True, 8)),
    ],
)
def test_the_form_of_a_run(
    world_size: int,
    settings: dict[str, Any],
    kernels: bool,
    wanted: tuple[str, str, bool, int],
) -> None:
    for line, *used in run_ranks(_made, world_size, 2, settings, kernels):
        assert line.startswith(f"tensor-parallel operators: {wanted[0]}")
        assert tuple(used) == wanted[1:]


def test_a_form_that_cannot_be_had_is_refused() -> None:
    for error, *_ in run_ranks(_made, 2, 2, {"flux": "fused"}, False):
        assert error.startswith('parallelism.flux is "fused", and this rank computes on cpu')
    for error, *_ in run_ranks(_made, 4, 2, {"flux": "fused"}, True):
        assert error.startswith('parallelism.flux is "fused" with pipeline or data parallelism')


def test_one_rank_has_plain_gemms_and_says_nothing() -> None:
    ((line, mode, *_),) = run_ranks(_made, 1, 1, {"flux": "fused"}, False)
    assert (line, mode) == ("", "auto")
