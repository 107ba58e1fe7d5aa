"""From the fused projection to the heads of attention, and back: split, rotate, join.

`heads(qkv_Tn, ...)` gives q, k and v of the fused projection, q and k turned by their positions
where there is a rotary table. Without one they are views. With one, one kernel writes all three
side by side into one tensor (v too: attention then keeps that tensor, and the projection goes).
Backward is one kernel in either case: it reads the three gradients in whatever order of dimensions
attention gives them, turns back, and writes the gradient of the projection as one matrix, where
torch would turn, copy and `cat`.

Triton on CUDA (`kernel.py`), torch's operations on CPU and in "plain" mode.

T = B S tokens, n = (K + 2G) H columns: K query heads, G key-value heads, H head dimension; R = H/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale.ops.column_split import Part
from megascale.ops.mode import OperatorMode, takes_kernels
from megascale.ops.rope import rotate

Table = tuple[Tensor, Tensor]
"""cos and sin, each [S, R] (`ops/rope.py`)."""


def split_heads(
    qkv_Tn: Tensor, seq_len: int, head_dim: int, queries_per_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views q `[B, S, K, H]`, k and v `[B, S, G, H]` of the fused projection `[T, (K + 2G) H]`."""
    all_heads = qkv_Tn.view(-1, seq_len, qkv_Tn.shape[-1] // head_dim, head_dim)
    kv_heads = all_heads.shape[2] // (queries_per_kv + 2)
    q, k, v = torch.split(all_heads, [queries_per_kv * kv_heads, kv_heads, kv_heads], dim=2)
    return q, k, v


def heads(
    qkv_Tn: Tensor,
    seq_len: int,
    head_dim: int,
    queries_per_kv: int,
    rope: Table | None = None,
    mode: OperatorMode = "fused",
    part: Part | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q `[B, S, K, H]`, k and v `[B, S, G, H]`; reference: `heads_reference`.

    part  where backward writes the gradient, if `qkv_Tn` is a part of a wider tensor
    """
    if mode == "plain":
        return heads_reference(qkv_Tn, seq_len, head_dim, queries_per_kv, rope)
    q, k, v = _Heads.apply(qkv_Tn, (seq_len, head_dim, queries_per_kv), rope, part)
    return q, k, v


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_Tn: Tensor, shape: tuple[int, int, int], rope: Table | None, part: Part | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.rope, ctx.part = rope, part
        ctx.like = qkv_Tn.shape, qkv_Tn.dtype, qkv_Tn.device
        if rope is None:
            return split_heads(qkv_Tn, *shape)
        turned_Tn = torch.empty(qkv_Tn.shape, dtype=qkv_Tn.dtype, device=qkv_Tn.device)
        _join(split_heads(qkv_Tn, *shape), rope, turned_Tn, back=False)
        return split_heads(turned_Tn, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like
        if ctx.part is None:
            grad_Tn = torch.empty(shape, dtype=dtype, device=device)
        else:
            grad_Tn = ctx.part.gradient()
        _join(grads, ctx.rope, grad_Tn, back=True)
        return grad_Tn, None, None, None


def _join(sources: tuple[Tensor, ...], rope: Table | None, out_Tn: Tensor, *, back: bool) -> None:
    """Write q, k and v side by side into `out`, q and k turned by their angles, or back."""
    if takes_kernels("fused", *sources, out_Tn):
        from megascale.ops.heads.launch import launch_join

        launch_join(sources, rope, out_Tn, back=back)
        return
    q, k, v = sources
    if rope is not None:
        cos_SR, sin_SR = rope
        sin_SR = -sin_SR if back else sin_SR
        q, k = rotate(q, cos_SR, sin_SR), rotate(k, cos_SR, sin_SR)
    out_Tn.copy_(torch.cat((q, k, v), dim=2).flatten(2).flatten(0, 1))


def heads_reference(
    qkv_Tn: Tensor, seq_len: int, head_dim: int, queries_per_kv: int, rope: Table | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, an operation each."""
    q, k, v = split_heads(qkv_Tn, seq_len, head_dim, queries_per_kv)
    if rope is None:
        return q, k, v
    # v is copied so that what attention keeps does not keep the whole projection
    return rotate(q, *rope), rotate(k, *rope), v.contiguous()
