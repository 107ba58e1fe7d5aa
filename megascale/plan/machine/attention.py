"""The price of an attention core that keeps its scores on the chip (FlashAttention, cuDNN).

Useful FLOPs are those of the (query, key) pairs that mask and window keep: 4 a pair, head and
head dimension forward, 10 backward (the scores are computed again). Kernels compute whole blocks,
and start and end each row of them, so `block` / 2 pairs a query are paid beside those it keeps; a
head's rate grows with its dimension; and few heads do not fill the device.
"""

from __future__ import annotations

from math import log

from pydantic import Field

from megascale.plan.machine.sourced import Sourced
from megascale.plan.work.operations import Attention
from megascale.units import window_share

USUAL_HEAD_DIM = 128

# Of a correction by samples in log sizes: less steep than the price, which must grow. A windowed
# core grows as the sequence, on which two of the coordinates depend.
SLOPE = 0.3
STEEPER = 2.6  # in the head dimension: kernels compute 96 as 128


class AttentionCurve(Sourced):
    """Shares of the device's peak, counted on useful FLOPs, at head dimension 128."""

    forward: float = Field(gt=0.0, le=1.0, description="share of the peak, long sequences")
    backward: float = Field(gt=0.0, le=1.0, description="share of the peak, long sequences")
    plain: float = Field(1.0, gt=0.0, le=1.0, description="rate of the library's form to this one")
    block: float = Field(
        ge=0.0, description="keys a query costs twice: masked blocks, and what starts a row of them"
    )
    half_head_dim: float = Field(ge=0.0, description="head dimension at which half the rate is")
    half_heads: float = Field(ge=0.0, description="heads x sequences that half fill the device")
    floor_s: float = Field(ge=0.0, description="of a kernel, however small; the gap before it")

    def matrix_s(self, attention: Attention, peak_flops: float) -> float:
        """Seconds of the tensor cores."""
        share = self.backward if attention.backward else self.forward
        share *= self.plain if attention.plain else 1.0
        usual = USUAL_HEAD_DIM / (USUAL_HEAD_DIM + self.half_head_dim)
        work = self._heads(attention) * self._head_dim(attention) * usual * self._pairs(attention)
        return (10.0 if attention.backward else 4.0) * work / (peak_flops * share)

    def _heads(self, attention: Attention) -> float:
        return attention.sequences * attention.heads + self.half_heads

    def _head_dim(self, attention: Attention) -> float:
        return attention.head_dim + self.half_head_dim

    def _pairs(self, attention: Attention) -> float:
        """Of a head: those kept, and half a block a query."""
        more = self.block / 2 * attention.seq_len
        return kept_pairs(attention.seq_len, attention.window) + more

    def coordinates(self, attention: Attention) -> tuple[float, float, float, float]:
        """In which a correction by samples is smooth."""
        return (
            log(self._heads(attention)),
            STEEPER * log(self._head_dim(attention)),
            log(self._pairs(attention)),
            log(attention.seq_len),
        )


def kept_pairs(seq_len: int, window: int | None) -> float:
    """(query, key) pairs of a sequence that the causal mask and the window keep."""
    return window_share(seq_len, window) * seq_len * (seq_len + 1) / 2


def attention_flops(attention: Attention) -> float:
    """Useful FLOPs, the floor of any kernel's work."""
    heads = attention.sequences * attention.heads
    pairs = kept_pairs(attention.seq_len, attention.window)
    return (10.0 if attention.backward else 4.0) * attention.head_dim * heads * pairs


def attention_bytes(attention: Attention) -> float:
    """Least bytes of device memory: queries, keys, values and the result once, in 16 bits; for the
    gradient those and the gradients of all."""
    tokens = attention.sequences * attention.seq_len
    elements = tokens * attention.head_dim * 2 * (attention.heads + attention.kv_heads)
    return 2.0 * elements * (2.0 if attention.backward else 1.0)
