"""Heads of the fused projection: torch's form, the kernel interpreted, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.ops.column_split import split_columns
from megascale.ops.heads import heads, heads_reference
from megascale.ops.rope import rope_table
from tests.ops.kernels import F64, interpreted, leaf, near, wide

ropes = pytest.mark.parametrize("with_rope", [True, False], ids=["rope", "none"])
Shape = tuple[int, int, int, int, int]  # sequences, their length, query and kv heads, H


@ropes
@pytest.mark.parametrize("mode", ["fused", "plain"])
def test_values_and_gradients(with_rope: bool, mode: Any) -> None:
    torch.manual_seed(0)
    qkv = leaf(6, 8 * 4, dtype=F64)
    rope = rope_table(3, 4, 100.0, None, F64, torch.device("cpu")) if with_rope else None
    found = heads(qkv, 3, 4, 2, rope, mode)
    for got, wanted in zip(found, heads_reference(qkv, 3, 4, 2, rope), strict=True):
        torch.testing.assert_close(got, wanted)
    assert torch.autograd.gradcheck(lambda x: heads(x, 3, 4, 2, rope, mode), (qkv,))


CASES: list[Shape] = [(1, 1, 1, 1, 8), (2, 9, 4, 2, 24), (1, 17, 9, 3, 16)]


@pytest.mark.full
@ropes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_interpreted(dtype: torch.dtype, with_rope: bool) -> None:
    interpreted(_check, dtype, with_rope, "cpu", CASES)


@pytest.mark.gpu
@ropes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_on_a_gpu(dtype: torch.dtype, with_rope: bool) -> None:
    _check(dtype, with_rope, "cuda", [*CASES, (1, 2048, 48, 48, 128), (3, 100, 32, 8, 80)])


def _check(dtype: torch.dtype, with_rope: bool, device: str, cases: list[Shape]) -> None:
    for shape in cases:
        for in_part in (False, True):
            _check_case(dtype, with_rope, device, shape, in_part)


def _check_case(
    dtype: torch.dtype, with_rope: bool, device: str, shape: Shape, in_part: bool
) -> None:
    batch, seq_len, num_q, num_kv, head_dim = shape
    width = (num_q + 2 * num_kv) * head_dim
    joined = torch.randn(batch * seq_len, width + 8 * in_part, device=device).to(dtype)
    joined.requires_grad_()
    rope = wide_rope = None
    if with_rope:
        rope = rope_table(seq_len, head_dim, 1e4, None, dtype, torch.device(device))
        wide_rope = rope[0].double(), rope[1].double()  # the same angles: fp32 loses some far out
    (qkv, *_), (part, *_) = split_columns(joined, (width, 8) if in_part else (width,))
    arguments = (seq_len, head_dim, num_q // num_kv)
    found = heads(qkv, *arguments, rope, part=part if in_part else None)
    wide_qkv = wide(qkv)
    wanted = heads_reference(wide_qkv, *arguments, wide_rope)
    grads = []
    for got, expected in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        near(got, expected, dtype)
        grads.append(_as_attention_gives(torch.randn_like(got)))
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    torch.autograd.backward(found, grads)
    assert joined.grad is not None
    assert wide_qkv.grad is not None
    near(joined.grad[:, :width], wide_qkv.grad, dtype)
    assert not joined.grad[:, width:].any()


@pytest.mark.gpu
def test_heads_that_lie_more_than_32_bits_apart() -> None:
    """The gradient of a long sequence with heads before positions: 131072 positions of 128 elements
    and 129 heads reach 2**31 elements."""
    from megascale.ops.heads.launch import launch_join

    apart, count = 2**30, 4
    if torch.cuda.mem_get_info()[0] < 2 * apart * count:
        pytest.skip(f"needs {2 * apart * count / 2**30:.0f} GiB of free device memory")
    memory = torch.empty(apart * (count - 1) + 64, dtype=torch.bfloat16, device="cuda")
    q = memory.as_strided((1, 8, count, 8), (64, 8, apart, 1))
    q.copy_(torch.randn(q.shape))
    k, v = (torch.randn(1, 8, 1, 8, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty(8, (count + 2) * 8, dtype=torch.bfloat16, device="cuda")
    launch_join((q, k, v), None, out, back=True)
    assert torch.equal(out, torch.cat((q, k, v), dim=2).flatten(2)[0])


def _as_attention_gives(grad_BSKH: Tensor) -> Tensor:
    """The same values with heads before positions in memory."""
    return grad_BSKH.transpose(1, 2).contiguous().transpose(1, 2)
