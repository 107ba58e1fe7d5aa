"""Waiting for flags on the stream, and sums of received parts, as host calls.

    wait_flags(arena, slot, range(W), skip_own=True)      # what copy engines of the peers announced
    sum_parts(out_cN, parts_WcN, own=own_cN, rank=arena.rank, bias=bias_N)

Each has a twin, `waiting` and `summing`, which compiles and loads the kernel and gives what
launches it, for forms that send in between (`kernel_call.py`). A sum that waits for flags itself is
used by such forms alone: `summing_arrived`.

Cost: a launch each (about 2 us in a graph); the sum runs at the speed of memory.

Legend: W ranks, c rows of a part, N columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot

_TILE = 4096  # elements of a sum's tile: 16 a thread, two 16-byte loads a part in flight
_MAX_COLUMNS = 2048


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def wait_flags(
    arena: Arena, slot: Slot, indices: range, *, per_source: int = 1, skip_own: bool = True
) -> None:
    """The current stream waits until this rank's flags `indices` are set, and clears them.

    One program that spins: never behind it on the stream what a peer waits for.
    """
    waiting(arena, slot, indices, per_source=per_source, skip_own=skip_own)()


def waiting(
    arena: Arena, slot: Slot, indices: range, *, per_source: int = 1, skip_own: bool = True
) -> Callable[[], None]:
    """What launches `wait_flags`.

    per_source  flags a source: flag i was set by rank i // per_source (for the report)
    skip_own    leave out the flags that would be this rank's own
    """
    from megascale.flux.symmetric.kernel import wait_flags_kernel
    from megascale.kernels.kernel_call import prepared

    if not len(indices) or (arena.world_size == 1 and skip_own):
        return _nothing
    arguments = {
        "flag_ptrs": slot.flag_ptrs,
        "report_ptr": arena.report,
        "rank": arena.rank,
        "first": indices.start,
        "count": len(indices),
        "step": indices.step,
        "per_source": per_source,
    }
    constants = {
        "BLOCK": min(128, next_power_of_2(len(indices))),
        "SKIP_OWN": skip_own,
        "DEADLINE_NS": arena.deadline_ns,
        "num_warps": 1,
    }
    return prepared(wait_flags_kernel, 1, arguments, constants)


def sum_parts(
    out_cN: Tensor,
    parts_WcN: Tensor,
    own: Tensor | None = None,
    rank: int = -1,
    bias: Tensor | None = None,
) -> Tensor:
    """out_cN = sum over the parts in rank order, in fp32, plus bias [N]; returns it."""
    summing(out_cN, parts_WcN, own, rank, bias)()
    return out_cN


def summing(
    out_cN: Tensor,
    parts_WcN: Tensor,
    own: Tensor | None = None,
    rank: int = -1,
    bias: Tensor | None = None,
) -> Callable[[], None]:
    """What launches `sum_parts`.

    own   [c, N] replaces part `rank` (what this rank computed need not be copied into the slot)
    All may have strides between rows, none between columns. 16-byte accesses where rows are
    multiples of 16 elements.
    """
    return _summing(out_cN, parts_WcN, own, bias, rank, _NO_FLAGS, _NO_WAIT)


def summing_arrived(
    out_cN: Tensor,
    parts_WcN: Tensor,
    arena: Arena,
    slot: Slot,
    *,
    own: Tensor | None = None,
    bias: Tensor | None = None,
    first_flag: int = 0,
    flags_per_source: int | None = None,
    rows_per_flag: int | None = None,
    counter: int = 0,
) -> Callable[[], None]:
    """What launches `sum_parts` in which every program waits for the flags of its rows; the last
    clears them.

    Flag of (source, row): first_flag + source * flags_per_source + row // rows_per_flag. By default
    one flag a source.
    counter  of finished programs, 0 to 15: another one for each sum that may run at the same time
    """
    rows = out_cN.shape[0]
    rows_per_flag = max(1, rows) if rows_per_flag is None else rows_per_flag
    num_flags = max(1, -(-rows // rows_per_flag))
    flags_per_source = num_flags if flags_per_source is None else flags_per_source
    if out_cN.numel() == 0:  # the call is still a dependency on every peer (arena.py)
        everybody = range(first_flag, first_flag + arena.world_size * flags_per_source)
        return waiting(arena, slot, everybody[::flags_per_source], per_source=flags_per_source)
    arguments = {
        "flag_ptrs": slot.flag_ptrs,
        "done_ptr": arena.done[4 * counter :],
        "report_ptr": arena.report,
        "first_flag": first_flag,
        "flags_per_source": flags_per_source,
        "rows_per_flag": rows_per_flag,
    }
    constants = {
        "WAIT": arena.world_size > 1,
        "BLOCK_F": min(32, next_power_of_2(max(1, (arena.world_size - 1) * num_flags))),
        "DEADLINE_NS": arena.deadline_ns,
    }
    return _summing(out_cN, parts_WcN, own, bias, arena.rank, arguments, constants)


def _nothing() -> None:
    """Nobody is waited for, or nothing is summed."""


_NO_FLAGS = {
    "flag_ptrs": None,
    "done_ptr": None,
    "report_ptr": None,
    "first_flag": 0,
    "flags_per_source": 1,
    "rows_per_flag": 1,
}
_NO_WAIT = {"WAIT": False, "BLOCK_F": 1, "DEADLINE_NS": 0}


def _summing(
    out_cN: Tensor,
    parts_WcN: Tensor,
    own: Tensor | None,
    bias: Tensor | None,
    rank: int,
    flags: dict[str, Any],
    wait: dict[str, Any],
) -> Callable[[], None]:
    from megascale.flux.symmetric.kernel import sum_parts_kernel
    from megascale.kernels.kernel_call import prepared

    rows, columns = out_cN.shape
    assert parts_WcN.shape[1:] == out_cN.shape, (parts_WcN.shape, out_cN.shape)
    assert own is None or (own.shape == out_cN.shape and rank >= 0), (own, rank)
    for tensor in (out_cN, parts_WcN, own, bias):
        assert tensor is None or tensor.shape[-1] == 1 or tensor.stride(-1) == 1, tensor.stride()
    if out_cN.numel() == 0:
        return _nothing
    block_c = min(_MAX_COLUMNS, next_power_of_2(columns))
    block_r = min(_TILE // block_c, next_power_of_2(rows))
    arguments = {
        "out_ptr": out_cN,
        "parts_ptr": parts_WcN,
        "own_ptr": own,
        "bias_ptr": bias,
        "flag_ptrs": flags["flag_ptrs"],
        "done_ptr": flags["done_ptr"],
        "report_ptr": flags["report_ptr"],
        "rows": rows,
        "columns": columns,
        "stride_out": out_cN.stride(0),
        "stride_own": 0 if own is None else own.stride(0),
        "stride_part": parts_WcN.stride(0),
        "stride_row": parts_WcN.stride(1),
        "first_flag": flags["first_flag"],
        "flags_per_source": flags["flags_per_source"],
        "rows_per_flag": flags["rows_per_flag"],
    }
    constants = {
        "RANK": rank,
        "WORLD": parts_WcN.shape[0],
        "HAS_OWN": own is not None,
        "HAS_BIAS": bias is not None,
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
        "num_warps": 8,
        **wait,
    }
    programs = -(-rows // block_r) * -(-columns // block_c)
    return prepared(sum_parts_kernel, programs, arguments, constants)
