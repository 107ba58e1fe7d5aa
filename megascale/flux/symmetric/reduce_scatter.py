"""The sum of rows over ranks, each rank keeping its own: one hop over symmetric memory.

A kernel sends every share to its owner and sums what it owns, in rank order in fp32. Above
`sizes.COPY_ENGINE_BYTES` a share, copy engines send chunks of rows, and a kernel sums each chunk as
soon as it has come from all ranks.

Legend: W ranks, T rows, t rows of this rank (c = ceil(T / W), the last ranks fewer or none), D
columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.symmetric import sizes
from megascale.flux.symmetric.config import DEFAULT, Sums
from megascale.flux.symmetric.launch import summing_arrived
from megascale.flux.symmetric.one_shot.launch import check_summable, sum_over_ranks
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def reduce_scatter(
    x_TD: Tensor,
    arena: Arena,
    *,
    copy_engine: bool | None = None,
    config: Sums | None = None,
) -> Tensor:
    """x_tD: this rank's rows of the sum over ranks, in a new tensor.

    x_TD         bf16, fp16 or fp32 of two dimensions, of one shape on all ranks
    copy_engine  None chooses by size
    config       how a kernel sends; None chooses by size
    """
    check_summable(x_TD, arena)
    if arena.world_size == 1 or x_TD.numel() == 0:
        return x_TD.clone() if arena.world_size == 1 else x_TD.new_empty(0, x_TD.shape[1])
    x_TD = x_TD.contiguous()
    num_rows, columns = x_TD.shape
    share = rows_per_rank(num_rows, arena.world_size) * columns
    first, end = shard_rows(num_rows, arena.world_size, arena.rank)
    y_tD = x_TD.new_empty(end - first, columns)
    if copy_engine is None:
        copy_engine = share * x_TD.element_size() > sizes.COPY_ENGINE_BYTES
    if copy_engine:
        _by_copies(x_TD, y_tD, arena)
    else:
        sum_over_ranks(x_TD, y_tD, share, arena, scatter=True, config=config or DEFAULT)
    return y_tD


def _by_copies(x_TD: Tensor, y_tD: Tensor, arena: Arena) -> None:
    """Chunk j of every share goes out before chunk j + 1 of any: owners sum them in that order.

    Flag of (source, chunk): source * chunks + chunk. A rank without rows is told by the same flags
    that the call has begun.
    """
    world_size, rank = arena.world_size, arena.rank
    num_rows, columns = x_TD.shape
    c, row_bytes = rows_per_rank(num_rows, world_size), columns * x_TD.element_size()
    num_chunks = sizes.chunks(c * row_bytes, c)
    rows = -(-c // num_chunks)
    num_chunks = -(-c // rows)
    first, end = shard_rows(num_rows, world_size, rank)
    with arena.turn(world_size * c * row_bytes) as slot:
        sum_as_they_come = summing_arrived(
            y_tD,
            slot.view(rank, (world_size, c, columns), x_TD.dtype)[:, : end - first],
            arena,
            slot,
            own=x_TD[first:end],
            flags_per_source=num_chunks,
            rows_per_flag=rows,
        )
        arena.fork()
        for chunk in range(num_chunks):
            for step in range(1, world_size):
                peer = (rank - step) % world_size
                there, end = shard_rows(num_rows, world_size, peer)
                start, stop = (min(there + (chunk + i) * rows, end) for i in (0, 1))
                arena.send(
                    slot.data[peer].data_ptr() + (rank * c + start - there) * row_bytes,
                    x_TD.data_ptr() + start * row_bytes,
                    (stop - start) * row_bytes,
                    slot.flags[peer].data_ptr() + 4 * (rank * num_chunks + chunk),
                )
        sum_as_they_come()
        arena.join()
