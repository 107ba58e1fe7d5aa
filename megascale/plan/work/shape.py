"""Sizes of one rank's part of a layer: what every operation of `work/` is written in.

`RankShape` holds what changes the operations of a layer and nothing else, so that it is the key
under which layers are priced once: a search of ten thousand layouts has a few hundred of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megascale.config import ModelConfig
from megascale.plan.case import Case, Recompute
from megascale.plan.schedules import SCHEDULES

Halves = Literal["whole", "split", "joined"]
"""Backward in one, in two halves, or with the weights' halves of several micro-batches joined."""


@dataclass(frozen=True)
class RankShape:
    """One micro-batch of one layer on one rank.

    masks      of dropout are kept, not made again
    symmetric  tensor ranks exchange through symmetric buffers, not allocated tensors
    one_pair   both ways out of a parallel block are one kernel (`flux/gemm_reduce_scatter/pair.py`)
    joined     micro-batches whose weight gradients are one product
    """

    model: ModelConfig
    tensor: int
    micro_batch_size: int
    seq_len: int
    dtype_bytes: int = 2
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    plain: bool = False
    scores: bool = False
    masks: bool = False
    symmetric: bool = False
    one_pair: bool = False
    halves: Halves = "whole"
    joined: int = 1

    @cached_property
    def tokens(self) -> int:
        return self.micro_batch_size * self.seq_len

    @cached_property
    def own_tokens(self) -> int:
        """Rows between linears: those of all ranks, or with sequence parallelism the own ones."""
        return -(-self.tokens // self.tensor) if self.sequence_parallel else self.tokens

    @cached_property
    def heads(self) -> int:
        return -(-self.model.num_heads // self.tensor)

    @cached_property
    def kv_heads(self) -> int:
        return -(-self.model.kv_heads // self.tensor)

    @cached_property
    def query(self) -> int:
        """Columns of q, and of attention's output."""
        return self.heads * self.model.dim_per_head

    @cached_property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.model.dim_per_head

    @cached_property
    def ffn(self) -> int:
        """Columns of the activation's result."""
        return -(-self.model.ffn_size // self.tensor)

    @cached_property
    def ffn_in(self) -> int:
        """Columns of its input: gate and up where there are both."""
        return (2 if self.model.gated else 1) * self.ffn

    @cached_property
    def hidden_bytes(self) -> float:
        """Of the hidden states of all tokens: what tensor-parallel collectives move."""
        return float(self.dtype_bytes * self.tokens * self.model.hidden_size)

    @cached_property
    def own_hidden_bytes(self) -> float:
        """Of the rows between linears."""
        return float(self.dtype_bytes * self.own_tokens * self.model.hidden_size)

    def column_bytes(self, columns: int) -> float:
        """Of a matrix of all tokens."""
        return float(self.dtype_bytes * self.tokens * columns)


def rank_shape(case: Case) -> RankShape:
    """The shape of a case's layers."""
    job, layout, software = case.job, case.layout, case.software
    return RankShape(
        model=job.model,
        tensor=layout.tensor,
        micro_batch_size=layout.micro_batch_size,
        seq_len=job.seq_len,
        dtype_bytes=job.dtype_bytes,
        recompute=layout.recompute,
        sequence_parallel=software.sequence_parallel,
        plain=software.operators == "plain",
        scores=software.attention == "scores",
        masks=software.keeps_masks,
        symmetric=software.tensor_overlap in ("chunked", "fused"),
        one_pair=software.tensor_overlap == "fused" and layout.tensor > 1,
        halves=halves_of(case),
        joined=layout.join_weight_gradients,
    )


def halves_of(case: Case) -> Halves:
    """How the case's backwards are cut: by its schedule, or because weight gradients are joined."""
    if case.layout.join_weight_gradients > 1:
        return "joined"
    return "split" if SCHEDULES[case.layout.schedule].splits_backward else "whole"
