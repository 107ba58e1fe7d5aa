"""Launch of the kernel that joins heads."""

from __future__ import annotations

import triton
from torch import Tensor

from megascale.kernels.kernel_call import launch
from megascale.ops.heads.kernel import join_heads_kernel

TOKENS = 16
HEADS = 8  # of a program: what a token's angles are read for


def launch_join(
    sources: tuple[Tensor, ...], rope: tuple[Tensor, Tensor] | None, out_Tn: Tensor, *, back: bool
) -> None:
    """Write q [B, S, K, H], k and v [B, S, G, H], strided as they are, into `out` [T, n]."""
    assert out_Tn.stride(1) == 1, out_Tn.stride()
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in sources)
    batch, seq_len, num_q, head_dim = q.shape
    num_kv = k.shape[2]
    num_blocks = -(-(num_q + 2 * num_kv) // HEADS)
    cos, sin = (None, None) if rope is None else (rope[0].contiguous(), rope[1].contiguous())
    strides = {
        f"{name}_{axis}_stride": x.stride(dim)
        for name, x in (("q", q), ("k", k), ("v", v))
        for dim, axis in enumerate(("batch", "token", "head"))
    }
    launch(
        join_heads_kernel,
        num_blocks * -(-batch * seq_len // TOKENS),
        {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "cos_ptr": cos,
            "sin_ptr": sin,
            "out_ptr": out_Tn,
            "num_tokens": batch * seq_len,
            "seq_len": seq_len,
            "num_q": num_q,
            "num_kv": num_kv,
            **strides,
            "out_row_stride": out_Tn.stride(0),
            "heads_each": HEADS,
            "num_blocks": num_blocks,
        },
        {
            "HEAD": head_dim,
            "BACK": back,
            "TOKENS": TOKENS,
            "WIDTH": triton.next_power_of_2(head_dim if rope is None else head_dim // 2),
        },
    )
