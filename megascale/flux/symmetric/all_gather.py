"""The rows of all ranks in rank order, over symmetric memory.

    x_TD = all_gather(x_tD, arena)
    gathering = start_all_gather(x_tD, arena); ...; x_TD = gathering.wait()

A kernel for small shares (in band, or by flags), copy engines above `sizes.COPY_ENGINE_BYTES` and
for `start_all_gather`, which leaves all SMs to what runs in between. Copy engines send in reverse
ring order, rank - 1 first: every rank then receives from rank + 1, rank + 2, ... and no two senders
meet at one receiver.

Every bit arrives as it was. Where the result is a view of the slot, it holds until the next flux
call but one of the group begins.

Legend: W ranks, T rows of all, t rows of this rank (c = ceil(T / W), the last ranks fewer or none),
D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.symmetric import sizes
from megascale.flux.symmetric.launch import waiting
from megascale.flux.symmetric.one_shot.launch import block_w, key_of
from megascale.flux.symmetric.prepared import Prepared
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot

Transport = Literal["in_band", "flags", "copy_engine"]


def all_gather(
    x_tD: Tensor, arena: Arena, num_rows: int | None = None, *, transport: Transport | None = None
) -> Tensor:
    """x_TD [num_rows, D]: a new tensor (in band), or a view of the slot.

    num_rows   T, where ranks own unequally many rows
    transport  None chooses by size; "in_band" must fit (FluxError)
    """
    num_rows = _rows(x_tD, arena, num_rows)
    if arena.world_size == 1 or num_rows * x_tD.shape[1] == 0:
        return x_tD if arena.world_size == 1 else x_tD.new_empty(num_rows, x_tD.shape[1])
    x_tD = x_tD.contiguous()
    share_bytes = rows_per_rank(num_rows, arena.world_size) * x_tD.shape[1] * x_tD.element_size()
    with arena.turn(arena.world_size * share_bytes) as slot:
        fits = _fits_in_band(x_tD, share_bytes, slot)
        if transport is None:
            large = share_bytes > sizes.COPY_ENGINE_BYTES
            transport = "in_band" if fits else "copy_engine" if large else "flags"
        assert transport != "in_band" or fits, (tuple(x_tD.shape), share_bytes)
        if transport == "copy_engine":
            return _Copies(x_tD, arena, slot, num_rows).receive()
        return _by_kernel(x_tD, arena, slot, num_rows, in_band=transport == "in_band")


class Gathering:
    """Rows on their way. `wait()` on the current stream before they are read.

    At most one other flux call of the group may lie between start and wait.
    """

    def __init__(self, arena: Arena, receive: Callable[[], Tensor]) -> None:
        self._receive = receive
        self._value: Tensor | None = None
        _started.setdefault(arena, WeakSet()).add(self)

    def wait(self) -> Tensor:
        """x_TD: a view of the slot."""
        if self._value is None:
            self._value = self._receive()
        return self._value

    def keep(self) -> None:
        """Wait now; the rows are kept apart from the slot, for which later calls may take turns."""
        if self._value is None:
            self._value = self._receive().clone()


def start_all_gather(x_tD: Tensor, arena: Arena, num_rows: int | None = None) -> Gathering:
    """Begin to gather by copy engines; the current stream goes on."""
    num_rows = _rows(x_tD, arena, num_rows)
    x_tD = x_tD.contiguous()
    if arena.world_size == 1 or num_rows * x_tD.shape[1] == 0:
        return Gathering(arena, lambda: x_tD)
    share_bytes = rows_per_rank(num_rows, arena.world_size) * x_tD.shape[1] * x_tD.element_size()
    with arena.turn(arena.world_size * share_bytes) as slot:
        return Gathering(arena, _Copies(x_tD, arena, slot, num_rows).receive)


_started: WeakKeyDictionary[Any, WeakSet[Gathering]] = WeakKeyDictionary()


def keep_started(arena: Arena) -> None:
    """End the gathers of this arena that were started: any number of calls may follow."""
    for gathering in _started.get(arena, ()):
        gathering.keep()


def _rows(x_tD: Tensor, arena: Arena, num_rows: int | None) -> int:
    if x_tD.dim() != 2:
        raise FluxError(f"x is {tuple(x_tD.shape)}; it must be a tensor of two dimensions")
    if x_tD.device.type != arena.device.type:
        raise FluxError(f"x is on {x_tD.device} and its group on {arena.device}; move it there")
    num_rows = x_tD.shape[0] * arena.world_size if num_rows is None else num_rows
    first, end = shard_rows(num_rows, arena.world_size, arena.rank)
    if end - first != x_tD.shape[0]:
        raise FluxError(
            f"x has {x_tD.shape[0]} rows on rank {arena.rank} of {arena.world_size} and num_rows "
            f"is {num_rows}; rank {arena.rank} must hold rows {first} to {end}, which are "
            f"{end - first}"
        )
    return num_rows


def _fits_in_band(x_tD: Tensor, share_bytes: int, slot: Slot) -> bool:
    """In band takes whole words of 4 bytes, each sent as 8."""
    return (x_tD.shape[1] * x_tD.element_size()) % 4 == 0 and sizes.goes_in_band(
        share_bytes // 4, 8, slot.world_size - 1, slot.flags[slot.rank].numel()
    )


class _Copies:
    """The own shard on its way into every slot, each followed by its flag; or flags without rows.

    The kernel that waits is loaded before anything is sent.
    """

    def __init__(self, x_tD: Tensor, arena: Arena, slot: Slot, num_rows: int) -> None:
        world_size, rank = arena.world_size, arena.rank
        self._x_tD = x_tD  # alive until the copies have read it
        self._arena = arena
        self._x_TD = slot.view(rank, (num_rows, x_tD.shape[1]), x_tD.dtype)
        self._wait = waiting(arena, slot, range(world_size))
        row_bytes = x_tD.shape[1] * x_tD.element_size()
        offset = rank * rows_per_rank(num_rows, world_size) * row_bytes
        num_bytes, source = x_tD.shape[0] * row_bytes, x_tD.data_ptr()
        arena.fork()
        for step in range(1, world_size):
            peer = (rank - step) % world_size
            flag = slot.flags[peer].data_ptr() + 4 * rank
            arena.send(slot.data[peer].data_ptr() + offset, source, num_bytes, flag)
        if num_bytes:
            slot.view(rank, x_tD.shape, x_tD.dtype, offset).copy_(x_tD)

    def receive(self) -> Tensor:
        """x_TD, when all of it has come."""
        self._wait()
        self._arena.join()
        return self._x_TD


def _by_kernel(x_tD: Tensor, arena: Arena, slot: Slot, num_rows: int, *, in_band: bool) -> Tensor:
    x, share, total = _as_integers(x_tD, num_rows, arena.world_size)
    if in_band:
        x_TD = x_tD.new_empty(num_rows, x_tD.shape[1])
        pieces = sizes.in_band_pieces(share, 8)  # few programs, each with one block
        assert pieces.blocks == 1, pieces
        prepared = _prepare(x.dtype, total, share, pieces, in_band, *key_of(arena))
        prepared.launch(x, x_TD.view(torch.int32), slot.flag_ptrs, arena.report)
        return x_TD
    flag_words = slot.flags[arena.rank].numel()
    most = sizes.programs_of(arena.num_sms)
    pieces = sizes.flag_pieces(share, x.element_size(), arena.world_size, flag_words, most)
    prepared = _prepare(x.dtype, total, share, pieces, in_band, *key_of(arena))
    prepared.launch(x, slot.data_ptrs, slot.flag_ptrs, arena.report)
    return slot.view(arena.rank, (num_rows, x_tD.shape[1]), x_tD.dtype)


@lru_cache(maxsize=1024)
def _prepare(
    _dtype: torch.dtype,
    total: int,
    share: int,
    pieces: sizes.Pieces,
    in_band: bool,
    rank: int,
    world_size: int,
    deadline_ns: int,
    _most: int,
    _device: torch.device,
) -> Prepared:
    from megascale.flux.symmetric.gather.kernel import (
        gather_by_flags_kernel,
        gather_in_band_kernel,
    )

    integers = {"share": share, "total": total}
    constants: dict[str, Any] = {"RANK": rank, "WORLD": world_size, "DEADLINE_NS": deadline_ns}
    constants |= pieces.options
    if in_band:
        integers["part"] = sizes.padded(share)
        return Prepared(gather_in_band_kernel, pieces.programs, integers, constants)
    constants["BLOCK_W"] = block_w(world_size)
    integers["blocks_a_program"] = pieces.rounds * pieces.blocks
    return Prepared(gather_by_flags_kernel, pieces.programs, integers, constants)


def _as_integers(x_tD: Tensor, num_rows: int, world_size: int) -> tuple[Tensor, int, int]:
    """(x as the widest integers that divide a row, elements of a share, elements of all)."""
    row_bytes = x_tD.shape[1] * x_tD.element_size()
    kind = next(k for k in (torch.int32, torch.int16, torch.int8) if row_bytes % k.itemsize == 0)
    columns = row_bytes // kind.itemsize
    return x_tD.view(kind), rows_per_rank(num_rows, world_size) * columns, num_rows * columns
