"""GEMM + reduce-scatter as a stream of chunks: cuBLAS beside copy engines (MegaScale 3.2).

A rank multiplies the rows of its peers first, rank + 1, rank + 2, ..., and its own last. After each
GEMM a copy engine pushes the block to its owner, with its flag behind it, while the next GEMM runs.
So only the addition can be exposed, and the choice between configurations is where it happens.

**Rows or columns.** MegaScale cuts this GEMM by columns, because its reduce-scatter is a collective
over all ranks: a block of columns of all m rows is a complete smaller reduce-scatter, a block of
rows would belong to one rank. Pushes need no collective, so blocks here are by default rows of one
owner: the last GEMM is then the own shard, after which nothing travels. By columns the last block
still has (W - 1) / W of its rows to send when the GEMMs are over; but every GEMM has all m rows,
which is better where a shard is less than a wave of tiles (m / W of a few hundred rows).

**Where the sum happens** (by rows).
- `own_blocks`: a kernel adds the product of the own rows to what was received, in rank order in
  fp32. It moves (W + 1) c N elements at the speed of memory. Cut in several blocks, the sum of one
  can run beside the GEMM of the next, on the second stream, as far as SMs are free.
- `fold`: the received parts become the output (their sum in rank order in fp32, rounded; at W = 2 a
  plain copy), and the own GEMM adds to it (beta = 1), block by block. Its epilogue reads the output
  once, under the GEMM: no pass comes after it. Rounded twice like the other: there it is the own
  product, here the sum of the others. It needs at least 2 `chunks`, so that one travels while the
  next is multiplied. Order at W = 2 on two streams: R1 | R2 | O1 | O2; R1 is pushed under R2 and
  copied under its end, R2 is pushed and copied under O1.
- `store`: the GEMM of a peer's rows writes into the owner's slot over NVLink itself. One pass over
  the product less and no copy, but SMs that wait for the link.

- Slot of the owner: [W, c, N] (`fold`: [W - 1, c, N] without the own slab; by columns one such
  block after another). The slab of a source is written by it alone and read by the owner's sum.
- Flag source * chunks + chunk at the owner: set behind the block, also behind an empty one; waited
  for and cleared by the owner before the sum that reads the block.

Deterministic: the order of additions is fixed. The bias is added once, by the owner, in its GEMM's
epilogue or with the sum.

Predictions for 2 x H200 and m 8192, to be checked: us exposed beside T_gemm, cuBLAS on the whole.
(Copies 385 GB/s + 5 us, memory 4.2 TB/s in both directions together, GEMMs at T_gemm a row.)

| | Llama-70B O: n 8192, k/tp 4096 | GPT-3 fc2: n 12288, k/tp 24576 |
|---|---|---|
| T_gemm | 721 | 7030 |
| waves of 128x256 on 132 SMs: whole, 2 + 2 blocks | 15.5, 16 | 23.3, 24 |
| push of half of a peer's rows, under a GEMM of | 92, 180 | 136, 1750 |
| sum at the end (own_blocks 1) | 53 (7.4 %) | 77 (1.1 %) |
| own_blocks 2: a sum hides, or does not | 29 (4 %), 53 | 41 (0.6 %), 77 |
| fold, 2 chunks, waits in a kernel | 25 (3.5 %) | 35 (0.5 %) |
| fold, 2 chunks, waits on the stream, copies on copy engines | 8 (1.1 %) | 10 (0.15 %) |
| the same, local copies on SMs after all | 32 (4.4 %) | 48 (0.7 %) |

Legend: W ranks, T rows of all ranks (m), t rows of this rank, c = ceil(m / W), K local reduction, N
columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.gemm_reduce_scatter.chunked_columns import ByColumns
from megascale.flux.gemm_reduce_scatter.chunked_rows import ByRows
from megascale.flux.lanes import can_wait_on_stream
from megascale.flux.problem import Layout, Problem
from megascale.flux.ranks import gemm
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


@dataclass(frozen=True)
class ChunkedReduceScatter:
    """How the work is cut. Every rank of a group uses the same in one call.

    split        blocks are rows of one owner, or columns of all rows
    chunks       blocks of a shard of rows, or of all columns
    growth       by rows: GEMMs of peers hold ..., growth, 1 blocks: many first, few before the own
    own_blocks   blocks of the own rows whose sums follow one by one (by rows, without `fold`)
    fold         the own GEMM adds to what was received (by rows)
    store        GEMMs of peers' rows write into the owner's memory (by rows)
    two_streams  sums on a second stream; with `fold` GEMMs alternate between two streams
    stream_wait  waits by the driver's stream memory operations (`lanes.receive`)
    """

    split: Literal["rows", "columns"] = "rows"
    chunks: int = 1
    growth: int = 2
    own_blocks: int = 1
    fold: bool = False
    store: bool = False
    two_streams: bool = True
    stream_wait: bool = False

    def __post_init__(self) -> None:
        if min(self.chunks, self.growth, self.own_blocks) < 1:
            raise FluxError(f"chunks, growth and own_blocks must be at least 1, got {self}")
        if self.split == "columns" and (self.fold or self.store or self.own_blocks > 1):
            raise FluxError(f'fold, store and own_blocks need split "rows", got {self}')
        if self.fold and self.own_blocks > 1:
            raise FluxError(
                f"with fold the own rows are cut into chunks, not own_blocks, got {self}"
            )


DEFAULT = ChunkedReduceScatter()
_FEW_ROWS = 256  # of a rank: two tiles of a GEMM. Less is not cut further


def candidates(problem: Problem) -> list[ChunkedReduceScatter]:
    """Configurations worth timing for this problem; the first is the default."""
    if problem.world_size == 1:
        return [DEFAULT]
    if problem.rows_a_rank < _FEW_ROWS:
        return [
            DEFAULT,
            ChunkedReduceScatter(store=True),
            ChunkedReduceScatter(split="columns"),
            ChunkedReduceScatter(split="columns", chunks=2),
        ]
    found = [
        DEFAULT,
        ChunkedReduceScatter(own_blocks=2),
        ChunkedReduceScatter(own_blocks=4),
        ChunkedReduceScatter(store=True),
        ChunkedReduceScatter(chunks=2, fold=True),
        ChunkedReduceScatter(split="columns", chunks=2),
    ]
    if problem.world_size > 2:
        found.append(ChunkedReduceScatter(growth=1, own_blocks=2))
        found.append(ChunkedReduceScatter(split="columns", chunks=4))
    if can_wait_on_stream():
        found.append(ChunkedReduceScatter(chunks=2, fold=True, stream_wait=True))
        found.append(ChunkedReduceScatter(chunks=2, fold=True, store=True, stream_wait=True))
    return found


@torch.no_grad()
def gemm_reduce_scatter(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    config: ChunkedReduceScatter = DEFAULT,
) -> Tensor:
    """y_tN: this rank's rows of the product summed over ranks, plus the bias once."""
    if arena.world_size == 1:
        return gemm(x_TK, weight, bias_N, layout=layout)
    weight_KN = weight.t() if layout == "NK" else weight
    num_columns = weight_KN.shape[1]
    c = rows_per_rank(x_TK.shape[0], arena.world_size)
    first, end = shard_rows(x_TK.shape[0], arena.world_size, arena.rank)
    y_tN = x_TK.new_empty(end - first, num_columns)
    slabs = arena.world_size - 1 if config.fold else arena.world_size
    with arena.turn(slabs * c * num_columns * x_TK.element_size()) as slot:
        by = ByColumns if config.split == "columns" else ByRows
        by(x_TK, weight_KN, bias_N, y_tN, arena, slot, config).run()
    return y_tN
