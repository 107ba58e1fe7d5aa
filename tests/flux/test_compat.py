"""`AGKernel` and `GemmRS`: the values of the operators, under the names of bytedance/flux."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.compat import AGKernel, GemmRS
from tests.distributed import run_ranks

M, N, K = 8, 6, 4
DTYPE = torch.float64


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def _values(rank: int, world_size: int) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    whole, weight, bias = _random(1, M, K), _random(2 + rank, N, K), _random(9, N)
    own = whole.chunk(world_size)[rank].contiguous()
    gather = AGKernel(group, 1, M, N, K, DTYPE, DTYPE)
    output, gathered = torch.empty(M, N, dtype=DTYPE), torch.empty(M, K, dtype=DTYPE)
    found = gather.forward(own, weight, bias[None], output, gathered_input=gathered)
    transposed = gather.forward(own, weight.t().contiguous(), transpose_weight=True)
    product = whole @ weight.t()

    xs, weights = ([_random(20 + r, *s) for r in range(world_size)] for s in ((M, K), (N, K)))
    summed = sum((x @ w.t() for x, w in zip(xs, weights, strict=True)), torch.zeros(()))
    rows = summed.chunk(world_size)[rank]
    plain = GemmRS(group, 1, M, N, DTYPE).forward(xs[rank], weights[rank])
    other = GemmRS(group, 1, M, N, DTYPE, transpose_weight=True)
    return [
        found is output,
        torch.allclose(output, product + bias),
        torch.equal(gathered, whole),
        torch.allclose(transposed, product),
        torch.allclose(plain, rows),
        torch.allclose(other.forward(xs[rank], weights[rank].t().contiguous()), rows),
    ]


def test_values() -> None:
    assert run_ranks(_values, 2) == [[True] * 6] * 2


ALONE: Any = None  # a group of this process
X, WEIGHT = torch.zeros(M, K), torch.zeros(N, K)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 2}, "nnodes is 2; these operators work inside one node"),
        ({"output_dtype": torch.float16}, "output_dtype is torch.float16 and input_dtype torch.fl"),
        ({"use_pdl": True}, "use_pdl is True, which has no meaning here"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"full_m": "8"}, "full_m is '8'; it must be an integer"),
        ({"k_dim": None}, "k_dim is None; it must be an integer"),
    ],
)
def test_a_gather_kernel_that_cannot_be_had_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"nnodes": 1, "full_m": M, "n_dim": N, "k_dim": K}
    with pytest.raises(FluxError, match=message):
        AGKernel(ALONE, input_dtype=torch.float32, **{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 4}, "nnodes is 4"),
        ({"fuse_reduction": True}, "fuse_reduction is True, .* in rank order in fp32"),
        ({"ring_reduction": True}, "ring_reduction is True, .* the tuner chooses"),
    ],
)
def test_a_scatter_kernel_that_cannot_be_had_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"nnodes": 1, "max_m": M, "n_dim": N}
    with pytest.raises(FluxError, match=message):
        GemmRS(ALONE, input_dtype=torch.float32, **{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(M + 1, K)}, "input has 9 rows and full_m / W was 8"),
        ({"input": X.double()}, "input is torch.float64 and input_dtype was torch.float32"),
        ({"input": torch.zeros(M, K + 1)}, r"input is \[8, 5\] and k_dim was 4"),
        ({"weight": torch.zeros(N + 1, K)}, r"weight is \[7, 4\] and n_dim was 6"),
        ({"weight": WEIGHT, "transpose_weight": True}, r"weight is \[6, 4\] and n_dim was 6; dim"),
        ({"bias": torch.zeros(M, N)}, r"bias is \[8, 6\]; it must be \[6\] or \[1, 6\]"),
        ({"output": torch.zeros(M, K)}, r"output is torch.float32 \[8, 4\]; it must be .*\[8, 6\]"),
        ({"gathered_input": X[1:]}, r"gathered_input is torch.float32 \[7, 4\]"),
        ({"input_scale": torch.ones(1)}, "input_scale is given, .* fp8 and int8 are not supported"),
        ({"fast_accum": True}, "fast_accum is True"),
        ({"input": None}, "input is None; it must be a tensor"),
        ({"input": X[0]}, r"input is \[4\]; it must have two dimensions"),
        ({"weight": None}, "weight is None; it must be a tensor"),
        ({"bias": 3}, "bias is 3; it must be a tensor"),
        ({"output": 3}, "output is 3; it must be a tensor"),
        ({"gathered_input": 3}, "gathered_input is 3; it must be a tensor"),
        ({"all_gather_option": object()}, "all_gather_option is .* the tuner chooses"),
    ],
)
def test_calls_of_a_gather_kernel_that_mean_nothing_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    kernel = AGKernel(ALONE, 1, M, N, K, torch.float32)
    with pytest.raises(FluxError, match=message):
        kernel.forward(**{"input": X, "weight": WEIGHT, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(M + 1, K)}, "input has 9 rows and max_m was 8"),
        ({"weight": torch.zeros(N + 1, K)}, r"weight is \[7, 4\] and n_dim was 6"),
        ({"bias": torch.zeros(N)}, "bias is given, .* every rank's bias is added before the sum"),
        ({"weight_scale": torch.ones(1)}, "weight_scale is given"),
        ({"input": None}, "input is None; it must be a tensor"),
        ({"weight": None}, "weight is None; it must be a tensor"),
        ({"reduce_scatter_option": object()}, "reduce_scatter_option is"),
    ],
)
def test_calls_of_a_scatter_kernel_that_mean_nothing_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    kernel = GemmRS(ALONE, 1, M, N, torch.float32)
    with pytest.raises(FluxError, match=message):
        kernel.forward(**{"input": X, "weight": WEIGHT, **changes})


def test_what_does_not_exist_here_says_what_to_use() -> None:
    gather, scatter = AGKernel(ALONE, 1, M, N, K, DTYPE), GemmRS(ALONE, 1, M, N, DTYPE)
    for call, instead in (
        (gather.gemm_only, "torch.nn.functional.linear"),
        (gather.profiling, 'tune="now"'),
        (scatter.forward_barrier, "complete in itself"),
        (scatter.forward_reduce_scatter, "call forward"),
        (scatter.zero_buffers, "leave the call out"),
        (scatter.profiling, 'tune="now"'),
    ):
        with pytest.raises(FluxError, match=f"{call.__name__} does not exist here; .*{instead}"):
            call()
