"""The collectives of the process group's backend (NCCL; gloo on CPU) with the forms' signature.

Legend: T rows of all ranks, t rows of this rank, D columns.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megascale.flux import collectives
from megascale.flux.ranks import Ranks, padded
from megascale.flux.tiles import rows_per_rank, shard_rows


def all_gather(x_tD: Tensor, arena: Ranks, num_rows: int | None = None) -> Tensor:
    """x_TD: the rows of all ranks in rank order.

    num_rows  m, where not every rank owns equally many rows (see the package's contract)
    """
    num_rows = x_tD.shape[0] * arena.world_size if num_rows is None else num_rows
    c = rows_per_rank(num_rows, arena.world_size)
    return collectives.all_gather(padded(x_tD, c), arena.group)[:num_rows]


def reduce_scatter(x_TD: Tensor, arena: Ranks) -> Tensor:
    """x_tD: this rank's rows of the sum over ranks."""
    num_rows, world_size = x_TD.shape[0], arena.world_size
    first, end = shard_rows(num_rows, world_size, arena.rank)
    x_TD = padded(x_TD, rows_per_rank(num_rows, world_size) * world_size)
    return collectives.reduce_scatter(x_TD, arena.group)[: end - first]


def all_reduce(x_TD: Tensor, arena: Ranks) -> Tensor:
    """The sum over ranks, in a new tensor."""
    y_TD = x_TD.clone()
    dist.all_reduce(y_TD, group=arena.group)
    return y_TD
