"""The portable engine the way it runs where there is no TMA, on one GPU with virtual ranks.

`test_gpu_virtual.py` has its way with descriptors. Rows that are no multiple of 16 bytes take this
one on every device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.flux.all_gather_gemm.config import FusedAllGather
from megascale.flux.forms import forms
from megascale.flux.gemm_config import GemmConfig
from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter
from tests.flux.test_gpu_virtual import _check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIGS: dict[str, type[GemmConfig]] = {"ag_gemm": FusedAllGather, "gemm_rs": FusedReduceScatter}
AMPERE: dict[str, Any] = {"block_n": 128, "block_k": 32, "num_stages": 4}
SHAPES = [(1, 256, 512), (127, 264, 520), (512, 768, 512), (1000, 776, 520)]  # m, n, k
ODD = [(64, 33, 64), (1000, 265, 520), (65, 264, 37), (130, 1, 1), (512, 129, 257)]


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("op", list(CONFIGS))
def test_values_by_pointers(op: str, world: int, layout: str) -> None:
    config = CONFIGS[op](tma=False, **AMPERE)
    for shape in SHAPES:
        wrong = _check(op, "fused", forms(op)["fused"], world, shape, layout, {"config": config})
        assert wrong == "", shape


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("op", list(CONFIGS))
def test_rows_of_any_length(op: str, layout: str) -> None:
    config = CONFIGS[op](**AMPERE)
    for shape in ODD:
        wrong = _check(op, "fused", forms(op)["fused"], 2, shape, layout, {"config": config})
        assert wrong == "", shape
