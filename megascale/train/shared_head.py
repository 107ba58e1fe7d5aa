"""A head that pipeline stages share, put together: module, shards, groups, loss."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from megascale.config import RunConfig
from megascale.model.output_head import OutputHead
from megascale.model.sharding import sharding_table
from megascale.parallel.cross_entropy import sharded_cross_entropy
from megascale.parallel.groups import Groups
from megascale.parallel.shared_head import SharedHead, meet
from megascale.parallel.tensor import (
    StoredParameter,
    TensorParallel,
    linear_operators,
    shard_chunk,
)

PARAMETER = "head.weight"


def own_rows(
    config: RunConfig, groups: Groups, tp: TensorParallel, dtype: torch.dtype
) -> tuple[OutputHead, list[StoredParameter]]:
    """This rank's rows of the head, still on the meta device."""
    head = OutputHead(config.model, device="meta", dtype=dtype)
    stored = shard_chunk(
        head,
        sharding_table(config.model),
        head.units(),
        _over_vocabulary(groups, tp),
        operators=linear_operators(tp),
    )
    return head, stored


def shared_head(
    config: RunConfig, groups: Groups, head: OutputHead, tp: TensorParallel, device: torch.device
) -> SharedHead:
    """The head with its loss and its groups, whose communicators exist after this."""
    assert groups.head is not None, groups
    assert groups.vocabulary is not None, groups
    for group in (groups.head, groups.vocabulary):
        meet(group, device)
    over_vocabulary = _over_vocabulary(groups, tp)
    loss = sharded_cross_entropy(config.model.vocab, over_vocabulary, config.operators.mode)
    return SharedHead(head, loss, groups.head, span=tp.span)


def _over_vocabulary(groups: Groups, tp: TensorParallel) -> TensorParallel:
    """The tensor ranks of all stages. Their collectives are not those of the tensor-parallel group
    and are counted apart."""
    place, mesh = groups.coordinates, groups.mesh

    def span(name: str, /, **fields: Any) -> AbstractContextManager[Any]:
        work = {"work": "pp"} if "work" in fields else {}
        return tp.span(name, **fields | {"group": "vocabulary"} | work)

    rank = place.pp_rank * mesh.tensor + place.tp_rank
    return TensorParallel(groups.vocabulary, rank, mesh.pipeline * mesh.tensor, span)
