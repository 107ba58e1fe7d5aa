"""The price of an attention core that keeps its scores on the chip (FlashAttention, cuDNN).

Useful FLOPs are those of the (query, key) pairs that mask and window keep: 4 a pair, head and
head dimension forward, 10 backward (the scores are computed again). Kernels compute whole blocks,
so the pairs of half a block a query are paid too; a head's rate grows with its dimension; and few
heads do not fill the device.
"""

from __future__ import annotations

from pydantic import Field

from megascale.plan.machine.sourced import Sourced
from megascale.plan.work.operations import Attention
from megascale.units import window_share

USUAL_HEAD_DIM = 128


class AttentionCurve(Sourced):
    """Shares of the device's peak, counted on useful FLOPs, at head dimension 128."""

    forward: float = Field(gt=0.0, le=1.0, description="share of the peak, long sequences")
    backward: float = Field(gt=0.0, le=1.0, description="share of the peak, long sequences")
    block: int = Field(128, ge=1, description="tokens a side of what a kernel computes at once")
    half_head_dim: float = Field(ge=0.0, description="head dimension at which half the rate is")
    half_heads: float = Field(ge=0.0, description="heads x sequences that half fill the device")
    floor_s: float = Field(ge=0.0, description="least time between two kernels")

    def matrix_s(self, attention: Attention, peak_flops: float) -> float:
        """Seconds of the tensor cores."""
        share = self.backward if attention.backward else self.forward
        heads = attention.sequences * attention.heads + self.half_heads
        usual = USUAL_HEAD_DIM / (USUAL_HEAD_DIM + self.half_head_dim)
        dim = (attention.head_dim + self.half_head_dim) * usual
        pairs = kept_pairs(attention.seq_len, attention.window) + self.block / 2 * attention.seq_len
        a_pair = 10.0 if attention.backward else 4.0
        return a_pair * dim * heads * pairs / (peak_flops * share)


def kept_pairs(seq_len: int, window: int | None) -> float:
    """(query, key) pairs of a sequence that the causal mask and the window keep."""
    return window_share(seq_len, window) * seq_len * (seq_len + 1) / 2


def attention_bytes(attention: Attention) -> float:
    """Least bytes of device memory: queries, keys, values and the result once, in 16 bits; for the
    gradient twice that (and the gradients of all)."""
    tokens = attention.sequences * attention.seq_len
    elements = tokens * attention.head_dim * 2 * (attention.heads + attention.kv_heads)
    return 2.0 * elements * (2.0 if attention.backward else 1.0)


def attention_flops(attention: Attention) -> float:
    """Useful FLOPs, the floor of any kernel's work."""
    heads = attention.sequences * attention.heads
    pairs = kept_pairs(attention.seq_len, attention.window)
    return (10.0 if attention.backward else 4.0) * attention.head_dim * heads * pairs
