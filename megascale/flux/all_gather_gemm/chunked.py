"""All-gather + GEMM as a stream of chunks: cuBLAS beside copy engines (MegaScale 3.2).

MegaScale breaks the GEMM into chunks of rows and runs each beside the transfer of the next. Here
copy engines transfer and not a communication kernel, so the GEMMs keep all SMs, and nothing spins
but a kernel of one program, so nothing starves. The robust form: torch and copies.

**Order.** A rank pushes its shard to rank - 1, rank - 2, ... on the copy stream, each piece before
its flag. The own shard is multiplied straight from x. Remote pieces follow in the order in which
they arrive, rank + 1, rank + 2, ..., in groups of 1, `growth`, growth^2, ... pieces: the first GEMM
can start early, the others are few and large (4 GEMMs and not 8 at W = 8, with growth 2). Pieces of
a group lie side by side in the slot and are one GEMM, except where it goes on from the last rank to
rank 0. Every GEMM writes its rows of the one output.

**Two streams.** GEMMs alternate between two streams. The last wave of one leaves the device partly
idle; the first tiles of the next fill it. Without this the waves of the parts add up to more than
those of the whole: 1024 rows of n 6144 (W = 8) are 192 tiles on 132 SMs, 73 % of two waves.

- Slot [m, K] of rank r: rows of shard s are written by rank s, read by r's GEMMs of this call, and
  where `gathered` by the caller until the next flux call but one begins.
- Flag s * pieces + piece at rank r: set by rank s behind the piece, also behind an empty one;
  waited for and cleared by r before the GEMM that reads the piece.

Cost: a launch and a wait a group, and the weight is read from memory once a GEMM. Host time: two
copies a peer and piece, a wait and a GEMM a group; 45 us at W = 2 (estimated).

Predictions for 2 x H200 and m 8192, to be checked: us exposed beside T_gemm, cuBLAS on the whole.
They are the gap between two GEMMs, 3 where streams overlap, and 0.1 a MB of traffic that they share
memory with. (Copies 385 GB/s + 5 us.) The transfer is hidden: it is shorter than the own GEMM.

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
    Lanes,
    block_length,
    block_of,
    can_wait_on_stream,
    growing,
    num_blocks,
    receive,
    send,
)
from megascale.flux.problem import Layout, Problem
from megascale.flux.ranks import gemm
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
    stream_wait  waits by the driver's stream memory operations (`lanes.receive`)
    """

    pieces: int = 1
    growth: int = 2
    two_streams: bool = True
    stream_wait: bool = False

    def __post_init__(self) -> None:
        if self.pieces < 1 or self.growth < 1:
            raise FluxError(f"pieces and growth must be at least 1, got {self}")


DEFAULT = ChunkedAllGather()
_FEW_ROWS = 256  # of a rank: two tiles of a GEMM. Less is not cut further


def candidates(problem: Problem) -> list[ChunkedAllGather]:
    """Configurations worth timing for this problem; the first is the default."""
    if problem.world_size == 1:
        return [DEFAULT]
    found = [DEFAULT, ChunkedAllGather(two_streams=False)]
    if problem.rows_a_rank >= _FEW_ROWS:
        found.append(ChunkedAllGather(pieces=2))
    if problem.world_size > 2:
        found.append(ChunkedAllGather(growth=1))
    if problem.world_size > 4:
        found.append(ChunkedAllGather(growth=4))
    if can_wait_on_stream():
        found.append(ChunkedAllGather(stream_wait=True))
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


@torch.no_grad()
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
    world_size = arena.world_size
    num_rows = x_tK.shape[0] * world_size if num_rows is None else num_rows
    x_tK = x_tK.contiguous()
    if outputs is None:
        axis = 0 if layout == "NK" else 1
        outputs = [x_tK.new_empty(num_rows, w.shape[axis]) for w in weights]
    call = _Call(x_tK, weights, biases, outputs, layout)
    if world_size == 1:
        call.multiply(x_tK, 0, num_rows)
        return call.outputs, x_tK if gathered else None
    num_columns = x_tK.shape[1]
    with arena.turn(num_rows * num_columns * x_tK.element_size()) as slot:
        _push(x_tK, num_rows, arena, slot, config, keep=gathered)
        x_TK = slot.view(arena.rank, (num_rows, num_columns), x_tK.dtype)
        lanes = Lanes(arena, two=config.two_streams)
        lanes.fork()
        call.multiply(x_tK, *shard_rows(num_rows, world_size, arena.rank))
        parts = remote_parts(num_rows, world_size, arena.rank, config)
        pieces = num_pieces(num_rows, world_size, config)
        for index, part in enumerate(parts, start=1):
            with lanes.use(index):
                flags = range(part.first_flag, part.end_flag)
                receive(arena, slot, flags, pieces, on_stream=config.stream_wait)
                rows_TK = x_TK[part.first_row : part.end_row]
                call.multiply(rows_TK, part.first_row, part.end_row)
        lanes.join()
        arena.join()
    return call.outputs, x_TK if gathered else None


def num_pieces(num_rows: int, world_size: int, config: ChunkedAllGather) -> int:
    """Flags of a source: pieces of a full shard."""
    rows = rows_per_rank(num_rows, world_size)
    return num_blocks(rows, block_length(rows, config.pieces))


class _Call:
    """The weights of a call and where their products go."""

    def __init__(
        self,
        x_tK: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        layout: Layout,
    ) -> None:
        assert all(y.dtype == x_tK.dtype for y in outputs), [y.dtype for y in outputs]
        self.outputs = list(outputs)
        self._terms = list(zip(weights, biases, self.outputs, strict=True))
        self._layout = layout

    def multiply(self, rows_TK: Tensor, first: int, end: int) -> None:
        """Rows [first, end) of every output, on the current stream."""
        if end > first:
            for weight, bias, y_TN in self._terms:
                gemm(rows_TK, weight, bias, layout=self._layout, out_TN=y_TN[first:end])


def _push(
    x_tK: Tensor, num_rows: int, arena: Arena, slot: Slot, config: ChunkedAllGather, *, keep: bool
) -> None:
    """On the copy stream: the own shard to every peer, then where `keep` into the own slot."""
    world_size, rank = arena.world_size, arena.rank
    pieces = num_pieces(num_rows, world_size, config)
    block = block_length(rows_per_rank(num_rows, world_size), config.pieces)
    shard, _ = shard_rows(num_rows, world_size, rank)
    row_bytes = x_tK.shape[1] * x_tK.element_size()
    with arena.side():
        for step in range(1, world_size):
            for piece in range(pieces):
                first, end = block_of(0, x_tK.shape[0], block, piece)
                data = x_tK[first:end]
                peer, flag = (rank - step) % world_size, rank * pieces + piece
                send(arena, slot, peer, flag, data, (shard + first) * row_bytes)
        if keep and x_tK.numel():
            slot.view(rank, x_tK.shape, x_tK.dtype, shard * row_bytes).copy_(x_tK)
