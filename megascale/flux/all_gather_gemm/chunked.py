"""All-gather + GEMM as a stream of chunks: cuBLAS beside copy engines (MegaScale 3.2).

MegaScale breaks the GEMM into chunks of rows and runs each beside the transfer of the next. Here
copy engines transfer and not a communication kernel, so the GEMMs keep all SMs, and streams wait
for flags themselves, so nothing spins and nothing starves. The robust form: torch and copies.

**Order.** A rank pushes its shard to rank - 1, rank - 2, ... on the copy stream, each piece before
its flag. The own shard is multiplied straight from x. Remote pieces follow in the order in which
they arrive, rank + 1, rank + 2, ..., in groups of 1, `growth`, growth^2, ... pieces: the first GEMM
can start early, the others are few and large (4 GEMMs and not 8 at W = 8, with growth 2). Pieces of
a group lie side by side in the slot and are one GEMM, except where it goes on from the last rank to
rank 0. Every GEMM writes its rows of the one output.

**Two streams.** GEMMs may alternate between two streams. The last wave of one leaves the device
partly idle; the first tiles of the next fill it. Without this the waves of the parts add up to more
than those of the whole: 1024 rows of n 6144 (W = 8) are 192 tiles on 132 SMs, 73 % of two waves. It
costs an event each way and a change of torch's stream a GEMM, so it is not the default.

- Slot [m, K] of rank r: rows of shard s are written by rank s, read by r's GEMMs of this call, and
  where `gathered` by the caller until the next flux call but one begins. Only then r writes its own
  shard too, on the second stream.
- Flag s * pieces + piece at rank r: set by rank s behind the piece, also behind an empty one;
  waited for and cleared by r before the GEMM that reads the piece.

Cost: a launch and a wait a group, and the weight is read from memory once a GEMM. Host time at
W = 2 (sum of the parts, each measured on a 2x H200 host; the call itself is to be measured): 40 us
for two GEMMs of torch, 10 for fork, copy and flag, 6 for the wait, 20 for the rest; 11 more where
`gathered`.

Predictions for 2 x H200 and m 8192: us exposed beside T_gemm, cuBLAS on the whole. They are the gap
between two GEMMs, 3 where streams overlap, and 0.1 a MB of traffic that they share memory with.
(Copies 385 GB/s + 5 us.) The transfer is hidden: it is shorter than the own GEMM. Measured: the
better of both took 0.98 of T_gemm for QKV, so nothing was exposed (under the power limit two
measurements of a GEMM differ by as much). The rest is to be checked.

| | Llama-70B QKV: n/tp 5120, k 8192 | GPT-3 fc1: n/tp 24576, k 12288 |
|---|---|---|
| T_gemm | 853 | 7074 |
| transfer, under an own GEMM of | 180, 427 | 267, 3540 |
| waves of 128x256 on 132 SMs: whole, parts | 9.7, 10 | 46.5, 48 |
| exposed, two streams | 10 (1.2 %) | 15 (0.2 %) |
| exposed, one stream: and the wave that is not full | 15 (1.8 %) | 150 (2.1 %) |

Legend: W ranks, T rows of all ranks (m), t rows of this rank (c = ceil(m / W), the last ranks fewer
or none), K reduction, N columns of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.lanes import (
    Arrival,
    Lanes,
    Send,
    block_length,
    block_of,
    growing,
    num_blocks,
    push,
    remembered,
    without_grad,
)
from megascale.flux.problem import Layout, Problem
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot


@dataclass(frozen=True)
class ChunkedAllGather:
    """How the work is cut. Every rank of a group uses the same in one call.

    pieces       of a shard, each with its own flag. More than one only pays where the transfer is
                 slower than the own GEMM: copy engines begin anew with every copy
    growth       of groups of pieces; 1 is a GEMM for every piece
    two_streams  GEMMs alternate between two streams
    """

    pieces: int = 1
    growth: int = 2
    two_streams: bool = False

    def __post_init__(self) -> None:
        if self.pieces < 1 or self.growth < 1:
            raise FluxError(f"pieces and growth must be at least 1, got {self}")


DEFAULT = ChunkedAllGather()


def candidates(problem: Problem) -> list[ChunkedAllGather]:
    """Configurations worth timing for this problem; the first is the default."""
    if problem.world_size == 1:
        return [DEFAULT]
    found = [DEFAULT, ChunkedAllGather(two_streams=True)]
    if problem.world_size > 2:  # less after the last arrival, where transfers are the limit
        found.append(ChunkedAllGather(growth=1, two_streams=True))
    return found


class Part(NamedTuple):
    """One wait for flags [first_flag, end_flag), one GEMM of rows [first_row, end_row)."""

    first_flag: int
    end_flag: int
    first_row: int
    end_row: int


@lru_cache(maxsize=1024)
def remote_parts(
    num_rows: int, world_size: int, rank: int, config: ChunkedAllGather
) -> tuple[Part, ...]:
    """What follows the own GEMM, in order. Every flag of a peer is in exactly one part."""
    block = block_length(rows_per_rank(num_rows, world_size), config.pieces)
    pieces = num_blocks(rows_per_rank(num_rows, world_size), block)
    units = []
    for step in range(1, world_size):
        source = (rank + step) % world_size
        for piece in range(pieces):
            rows = block_of(*shard_rows(num_rows, world_size, source), block, piece)
            flag = source * pieces + piece
            units.append(Part(flag, flag + 1, *rows))
    parts: list[Part] = []
    for group in growing(len(units), config.growth):
        for position, unit in enumerate(units[group.start : group.stop]):
            if position and unit.first_flag == parts[-1].end_flag:
                parts[-1] = parts[-1]._replace(end_flag=unit.end_flag, end_row=unit.end_row)
            else:
                parts.append(unit)
    return tuple(parts)


@without_grad
def all_gather_gemm(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arena: Arena,
    *,
    layout: Layout,
    num_rows: int | None,
    gathered: bool,
    config: ChunkedAllGather = DEFAULT,
    outputs: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """([y_TN of each weight], x_TK where `gathered`: valid until the next flux call but one).

    num_rows  m, where not every rank owns equally many rows
    outputs   contiguous [m, N] a weight to write; else they are allocated
    """
    world_size, num_columns = arena.world_size, x_tK.shape[1]
    num_rows = x_tK.shape[0] * world_size if num_rows is None else num_rows
    x_tK = x_tK.contiguous()
    weights_KN = [w.t() for w in weights] if layout == "NK" else weights
    if outputs is None:
        outputs = [x_tK.new_empty(num_rows, w_KN.shape[1]) for w_KN in weights_KN]
    terms = list(zip(weights_KN, biases, outputs, strict=True))
    if world_size == 1:
        _multiply(x_tK, 0, num_rows, terms)
        return list(outputs), x_tK if gathered else None
    dtype = x_tK.dtype
    with arena.turn(num_rows * num_columns * x_tK.element_size()) as slot:
        plan = remembered(
            slot,
            ("ag_gemm", num_rows, num_columns, dtype, config),
            lambda: _Plan(slot, num_rows, num_columns, dtype, config),
        )
        lanes = Lanes(arena, two=config.two_streams or gathered)
        lanes.load((arrival for arrival, _, _ in plan.parts), slot)
        source = x_tK.data_ptr()
        push(arena, plan.sends, source)
        lanes.fork()
        if gathered:
            lanes.copy(1, plan.own_address, source, plan.own_bytes)
        _multiply(x_tK, *plan.own, terms)
        for index, (arrival, x_RK, part) in enumerate(plan.parts, start=1):
            lane = index if config.two_streams else 0
            with lanes.use(lane):
                lanes.receive(lane, arrival, slot)
                _multiply(x_RK, part.first_row, part.end_row, terms)
        lanes.join()
        arena.join()
    return list(outputs), plan.x_TK if gathered else None


def num_pieces(num_rows: int, world_size: int, config: ChunkedAllGather) -> int:
    """Flags of a source: pieces of a full shard."""
    rows = rows_per_rank(num_rows, world_size)
    return num_blocks(rows, block_length(rows, config.pieces))


class _Plan:
    """Of one problem and one slot: addresses and views that cost more to make than to use.

    x_TK   rows of all ranks in the own slot
    own    first and end row of this rank; its rows are kept at `own_address`
    parts  what follows the own GEMM: what it waits for, its rows, which they are
    """

    def __init__(
        self,
        slot: Slot,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        config: ChunkedAllGather,
    ) -> None:
        rank, world_size = slot.rank, slot.world_size
        pieces = num_pieces(num_rows, world_size, config)
        row_bytes = num_columns * dtype.itemsize
        self.own = first, end = shard_rows(num_rows, world_size, rank)
        self.own_bytes = (end - first) * row_bytes
        self.own_address = slot.data[rank].data_ptr() + first * row_bytes
        self.x_TK = slot.view(rank, (num_rows, num_columns), dtype)
        self.sends = self._sends(slot, num_rows, row_bytes, config)
        self.parts = []
        for part in remote_parts(num_rows, world_size, rank, config):
            arrival = Arrival(slot, range(part.first_flag, part.end_flag), pieces)
            self.parts.append((arrival, self.x_TK[part.first_row : part.end_row], part))

    def _sends(
        self, slot: Slot, num_rows: int, row_bytes: int, config: ChunkedAllGather
    ) -> list[Send]:
        rank, world_size = slot.rank, slot.world_size
        pieces = num_pieces(num_rows, world_size, config)
        block = block_length(rows_per_rank(num_rows, world_size), config.pieces)
        sends = []
        for step in range(1, world_size):
            peer = (rank - step) % world_size
            to, flags = slot.data[peer].data_ptr(), slot.flags[peer].data_ptr()
            for piece in range(pieces):
                first, end = block_of(*self.own, block, piece)
                offset = (first - self.own[0]) * row_bytes
                flag = flags + 4 * (rank * pieces + piece)
                sends.append(Send(to + first * row_bytes, offset, (end - first) * row_bytes, flag))
        return sends


_Term = tuple[Tensor, Tensor | None, Tensor]  # weight [K, N], bias, output


def _multiply(rows_TK: Tensor, first: int, end: int, terms: Sequence[_Term]) -> None:
    """Rows [first, end) of every output, on the current stream."""
    if end > first:
        for weight_KN, bias, y_TN in terms:
            if bias is None:
                torch.mm(rows_TK, weight_KN, out=y_TN[first:end])
            else:
                torch.addmm(bias, rows_TK, weight_KN, out=y_TN[first:end])
