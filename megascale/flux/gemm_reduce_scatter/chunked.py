"""GEMM + reduce-scatter as a stream of chunks: cuBLAS beside copy engines (MegaScale 3.2).

A rank multiplies the rows of its peers first, rank + 1, rank + 2, ..., and its own last. After each
GEMM a copy engine pushes the block to its owner, with its flag behind it, while the next GEMM runs.
So only the addition can be exposed, and the choice between configurations is where it happens.

**Rows, not columns.** MegaScale cuts this GEMM by columns, because its reduce-scatter is a
collective over all ranks: a block of columns of all m rows is a complete smaller reduce-scatter, a
block of rows would belong to one rank. Pushes need no collective, so blocks here are rows of one
owner: the last GEMM is then the own shard, after which nothing travels. By columns the last block
still has (W - 1) / W of its rows to send when the GEMMs are over. Built and measured (2 x H200, m
8192, two blocks, of cuBLAS alone): 1.034 for GPT-3 fc2, 0.964 for Llama fc2, never the best.

**Where the sum happens.**
- By default a kernel adds the product of the own rows to what was received, in rank order in fp32.
  It moves (W + 1) c N elements at the speed of memory. With 2 `chunks` on two streams the sum of
  one can run beside the GEMM of the next, as far as SMs are free.
- `fold`: the received parts become the output (their sum in rank order in fp32, rounded; at W = 2 a
  plain copy), and the own GEMM adds to it (beta = 1), block by block. Its epilogue reads the output
  once, under the GEMM: no pass comes after it. Rounded twice like the other: there it is the own
  product, here the sum of the others. It needs at least 2 `chunks`, so that one travels while the
  next is multiplied. Order at W = 2 on two streams: R1 | R2 | O1 | O2; R1 is pushed under R2 and
  copied under its end, R2 is pushed and copied under O1.
- `store`: the GEMM of a peer's rows writes into the owner's slot over NVLink itself. One pass over
  the product less and no copy, but SMs that wait for the link.

- Slot of the owner: [W, c, N] (`fold`: [W - 1, c, N] without the own slab). The slab of a source is
  written by it alone and read by the owner's sum.
- Flag source * chunks + chunk at the owner: set behind the block, also behind an empty one; waited
  for and cleared by the owner before the sum that reads the block.

Deterministic: the order of additions is fixed. The bias is added once, by the owner, in its GEMM's
epilogue or with the sum.

Host time at W = 2 (sum of the parts, each measured on a 2x H200 host; the call itself is to be
measured): 40 us for two GEMMs of torch, 10 for fork, copy and flag, 6 for the wait, 15 for the sum,
25 for the rest. With 2 chunks on two streams twice the first four.

Predictions for 2 x H200 and m 8192: us exposed beside T_gemm, cuBLAS on the whole (copies 385 GB/s
+ 5 us, memory 4.2 TB/s in both directions together, GEMMs at T_gemm a row). Measured, as a part of
T_gemm, when a call still took 350 to 1000 us of host time:

| | Llama-70B O: n 8192, k/tp 4096 | GPT-3 fc2: n 12288, k/tp 24576 | Llama fc2: 8192, 14336 |
|---|---|---|---|
| T_gemm | 721 | 7030 | 2803 |
| waves of 128x256 on 132 SMs: whole, 2 + 2 blocks | 15.5, 16 | 23.3, 24 | 15.5, 16 |
| push of half of a peer's rows, under a GEMM of | 92, 180 | 136, 1750 | 92, 700 |
| sum at the end; measured | 53 (7.4 %); 1.016 | 77 (1.1 %); 1.023 | 53 (1.9 %); 0.974 |
| 2 own blocks, a sum hides or does not; measured | 29, 53; host | 41, 77; 0.995 | 29, 53; 0.978 |
| fold, 2 chunks, waits in a kernel; measured | 25; host | 35; 1.021 | 25; 0.953 |
| fold, 2 chunks, waits on the stream; measured | 8; host | 10; 1.043 | 8; 1.003 |
| store; measured | 1.077 | 1.014 | 0.978 |

"host": 1.08 to 1.17, because the host took longer than the GPU then. The rows of `bench flux` are
newer and have the best configuration of each case: O m 8192 1.06, Llama fc2 1.02. Under the power
limit two measurements of a GEMM differ by 2 %, so the large shapes do not tell these apart.
That the sum costs less than predicted is clear. GPT-3 fc2 at m 4096: 0.999. The 2 own blocks came
then after one push of all rows of a peer, and now after two.

Legend: W ranks, T rows of all ranks (m), t rows of this rank, c = ceil(m / W), K local reduction, N
columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.gemm_reduce_scatter.chunked_rows import queue_rows
from megascale.flux.lanes import without_grad
from megascale.flux.problem import Layout, Problem
from megascale.flux.ranks import gemm
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


@dataclass(frozen=True)
class ChunkedReduceScatter:
    """How the work is cut. Every rank of a group uses the same in one call.

    chunks       blocks of a shard, each with its own flag and its own sum
    growth       GEMMs of peers hold ..., growth, 1 blocks: many first, few before the own
    fold         the own GEMM adds to what was received
    store        GEMMs of peers' rows write into the owner's memory
    two_streams  GEMMs alternate between two streams, each followed by its sum
    """

    chunks: int = 1
    growth: int = 2
    fold: bool = False
    store: bool = False
    two_streams: bool = False

    def __post_init__(self) -> None:
        if min(self.chunks, self.growth) < 1:
            raise FluxError(f"chunks and growth must be at least 1, got {self}")


DEFAULT = ChunkedReduceScatter()
_FEW_ROWS = 256  # of a rank: two tiles of a GEMM. Less is not cut further


def candidates(problem: Problem) -> list[ChunkedReduceScatter]:
    """Configurations worth timing for this problem; the first is the default."""
    if problem.world_size == 1:
        return [DEFAULT]
    found = [
        DEFAULT,
        ChunkedReduceScatter(two_streams=True),
        ChunkedReduceScatter(store=True),
    ]
    if problem.rows_a_rank >= _FEW_ROWS:
        found.append(ChunkedReduceScatter(chunks=2, two_streams=True))
        found.append(ChunkedReduceScatter(chunks=2, fold=True, two_streams=True))
    if problem.world_size > 2:  # transfers begin earlier, where they are the limit
        found.append(ChunkedReduceScatter(growth=1, two_streams=True))
    return found


@without_grad
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
    num_rows, num_columns = x_TK.shape[0], weight_KN.shape[1]
    c = rows_per_rank(num_rows, arena.world_size)
    first, end = shard_rows(num_rows, arena.world_size, arena.rank)
    y_tN = x_TK.new_empty(end - first, num_columns)
    slabs = arena.world_size - 1 if config.fold else arena.world_size
    with arena.turn(slabs * c * num_columns * x_TK.element_size()) as slot:
        queue_rows(x_TK, weight_KN, bias_N, y_tN, arena, slot, config)
    return y_tN
