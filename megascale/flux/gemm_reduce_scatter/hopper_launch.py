"""Launch of the fused Hopper kernel of GEMM + reduce-scatter (`hopper.py`), staged or not.

Staged wherever the configuration asks for chunks and `can_stage`. Both kernels of a problem are
loaded at its first call, so that a capture, which is not staged, always finds its own.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from megascale.flux.gemm_reduce_scatter.hopper import gemm_reduce_scatter_hopper
from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.gemm_reduce_scatter.staging import Staging, can_stage, staging_of
from megascale.flux.tiles import ceil_div
from megascale.kernels.driver import current_stream
from megascale.kernels.hopper_gemm import CONSUMER_WARPS, descriptor, weight_descriptor
from megascale.kernels.kernel_call import MOST_CALLS, KernelCall, loaded
from megascale.kernels.remembered import Remembered
from megascale.kernels.scratch import scratch_from_torch

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot


class _Operands(NamedTuple):
    """The tensors of a launch in the order of the kernel's parameters. `added`: the bias, or any
    tensor; `room`, `counters`: of the staging, or any."""

    x: Tensor
    weight: Tensor
    x2: Tensor
    weight2: Tensor
    received: Tensor
    out: Tensor
    added: Tensor
    data_ptrs: Tensor
    flag_ptrs: Tensor
    own_flags: Tensor
    report: Tensor
    room: Tensor
    counters: Tensor


_calls: Remembered[tuple[Any, ...], KernelCall] = Remembered(MOST_CALLS)


def launch(
    x_mK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    slot: Slot,
    arena: Arena,
    config: Any,
    layout: str,
    *,
    pair: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch on the current stream. `out` has the own rows, [own, N]; all tensors are contiguous.

    pair  a second (x [m, K2], weight) whose product is added before the sum over ranks
    """
    if out.shape[0] == 0:  # no own rows: the tiles without rows still close the call
        out = out.new_empty(1, out.shape[1])
    x2, weight2 = (x_mK, weight) if pair is None else pair
    added = out if bias is None else bias
    is_aligned = added.data_ptr() % 16 == 0
    stream = current_stream(out.device.index)
    staging = None
    if config.chunks and is_aligned and can_stage(arena, stream):
        staging = staging_of(slot, arena, x_mK.shape[0], out.shape[1], out.dtype, config)
    operands = _Operands(
        x_mK, weight, x2, weight2, slot.data[slot.rank], out, added, slot.data_ptrs,
        slot.flag_ptrs, slot.flags[slot.rank], arena.report, out, arena.done,
    )  # fmt: skip
    flags = (bias is not None, pair is not None)
    if not is_aligned:
        programs, arguments, constants = _arguments(operands, slot, arena, config, layout, *flags)
        with scratch_from_torch():
            gemm_reduce_scatter_hopper[(programs,)](**arguments, **constants)
        return
    key: tuple[Any, ...] = (
        x_mK.shape, weight.shape, x2.shape, x_mK.dtype, layout, slot.world_size, config, flags,
        id(arena), slot.rank, arena.num_sms, arena.deadline_ns, x_mK.device,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:  # also where it is staged: a capture then finds this kernel loaded
        call = _calls[key] = _made(operands, slot, arena, config, layout, flags, None)
    if staging is None:
        call.launch(stream, operands)
        return
    operands = operands._replace(room=staging.room(out), counters=staging.counters)
    key = (*key, staging.tiles_a_chunk)
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = _made(operands, slot, arena, config, layout, flags, staging)
    collects = gc.isenabled()
    gc.disable()  # nobody's finalizer waits for the device before the copies are queued
    try:
        arena.fork()
        call.launch(stream, operands)
        staging.carry(operands.room, arena)
    finally:
        if collects:
            gc.enable()


def _made(
    operands: _Operands,
    slot: Slot,
    arena: Arena,
    config: Any,
    layout: str,
    flags: tuple[bool, bool],
    staging: Staging | None,
) -> KernelCall:
    """The kernel of this problem, compiled and loaded. `flags`: has_bias, is_pair."""
    programs, arguments, constants = _arguments(
        operands, slot, arena, config, layout, *flags, staging
    )
    compiled = loaded(gemm_reduce_scatter_hopper, operands.out.device, arguments, constants)
    return KernelCall(compiled, arguments, programs, arena)


def _arguments(
    of: _Operands,
    slot: Slot,
    arena: Arena,
    config: Any,
    layout: str,
    has_bias: bool,
    is_pair: bool,
    staging: Staging | None = None,
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(programs, arguments, constants) of a launch, in the order of the kernel's parameters."""
    m, columns = of.x.shape[0], of.out.shape[1]
    tiles_n = ceil_div(columns, config.block_n)
    grid = ScatterTiles(m, slot.world_size, slot.rank, config.block_m, tiles_n, config.group_m)
    a_block, c_block = (config.block_m, config.block_k), (config.block_m, config.block_n)
    shape = (slot.world_size * grid.rows_per_rank, columns)
    arguments = {
        "x_desc": descriptor(of.x, a_block),
        "weight_desc": weight_descriptor(of.weight, layout, config.block_n, config.block_k),
        "x2_desc": descriptor(of.x2, a_block),
        "weight2_desc": weight_descriptor(of.weight2, layout, config.block_n, config.block_k),
        "received_desc": descriptor(slot.view(slot.rank, shape, of.x.dtype), c_block),
        "out_desc": descriptor(of.out, c_block),
        "bias_ptr": of.added,
        "data_ptrs": of.data_ptrs,
        "flag_ptrs": of.flag_ptrs,
        "own_flags_ptr": of.own_flags,
        "report_ptr": of.report,
        "staging_ptr": of.room,
        "counters_ptr": of.counters,
        "tiles_a_chunk": grid.tiles_per_shard if staging is None else staging.tiles_a_chunk,
        "rank": slot.rank,
        "tiles_m": grid.tiles_m,
        "tiles_n": tiles_n,
        "shard_rows": grid.rows_per_rank,
        "num_columns": columns,
        "k_steps": ceil_div(of.x.shape[1], config.block_k),
        "k2_steps": ceil_div(of.x2.shape[1], config.block_k) if is_pair else 0,
    }
    constants = {
        "STAGES": config.num_stages,
        "GROUP_M": config.group_m,
        "WORLD": slot.world_size,
        "KN": layout == "KN",
        "PAIR": is_pair,
        "HAS_BIAS": has_bias,
        "STAGED": staging is not None,
        "PIECES": config.pieces if staging is None else 1,
        "DEADLINE_NS": arena.deadline_ns,
        "num_warps": CONSUMER_WARPS.value,
    }
    return min(arena.num_sms, grid.num_tiles), arguments, constants
