"""torch's own operators over symmetric memory, as forms: the rivals of ours and tuner candidates.

`fused_all_gather_matmul` and `fused_matmul_reduce_scatter` split the GEMM by shards on two streams
(the "AsyncTP" of torch); `one_shot_all_reduce` and `two_shot_all_reduce` follow a GEMM that wrote
into a symmetric buffer. All of them exist in torch 2.11 and 2.13 under these signatures.

No multicast: torch picks a `multimem` gather for few rows where the device reports multicast, so
`return_A` stays True there, which excludes that path (`TORCH_SYMM_MEM_DISABLE_MULTICAST` switches
the report off as well). Rows that the ranks do not divide are padded, as a user of torch would.

Legend: T rows of all ranks (m), t rows of this rank, K reduction, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from megascale.flux.problem import Layout
from megascale.flux.ranks import Ranks, gemm, padded
from megascale.flux.tiles import rows_per_rank, shard_rows

_ALIGNMENT_BYTES = 16


def all_gather_gemm(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arena: Ranks,
    *,
    layout: Layout,
    num_rows: int | None,
    gathered: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """([y_TN of each weight], x_TK where `gathered`)."""
    num_rows = x_tK.shape[0] * arena.world_size if num_rows is None else num_rows
    x_tK = padded(x_tK, rows_per_rank(num_rows, arena.world_size))
    x_TK, products = torch.ops.symm_mem.fused_all_gather_matmul(
        x_tK,
        [w.t() if layout == "NK" else w for w in weights],
        0,
        arena.group.group_name,
        return_A=gathered or _has_multicast(arena.device),
    )
    outputs = [
        y_TN[:num_rows] if b is None else y_TN[:num_rows].add_(b)
        for y_TN, b in zip(products, biases, strict=True)
    ]
    return outputs, x_TK[:num_rows] if gathered else None


def gemm_reduce_scatter(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, arena: Ranks, *, layout: Layout
) -> Tensor:
    """y_tN: this rank's rows of the product summed over ranks, plus the bias once."""
    num_rows, world_size = x_TK.shape[0], arena.world_size
    x_TK = padded(x_TK, rows_per_rank(num_rows, world_size) * world_size)
    weight_KN = weight.t() if layout == "NK" else weight
    y_tN: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x_TK, weight_KN, "sum", 0, arena.group.group_name
    )
    first, end = shard_rows(num_rows, world_size, arena.rank)
    y_tN = y_tN[: end - first]
    return y_tN if bias_N is None else y_tN.add_(bias_N)


def one_shot(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, arena: Ranks, *, layout: Layout
) -> Tensor:
    """y_TN: GEMM into symmetric memory, then every rank reads and sums all of it."""
    partial_TN = _product_in_buffer(x_TK, weight, arena, layout)
    name = arena.group.group_name
    y_TN: Tensor = torch.ops.symm_mem.one_shot_all_reduce(partial_TN, "sum", name)
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def two_shot(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, arena: Ranks, *, layout: Layout
) -> Tensor:
    """y_TN: each rank sums a slice and all ranks collect the slices, into a tensor of its own."""
    partial_TN = _product_in_buffer(x_TK, weight, arena, layout)
    y_TN = torch.empty_like(partial_TN)
    torch.ops.symm_mem.two_shot_all_reduce_out(partial_TN, "sum", arena.group.group_name, y_TN)
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def two_shot_in_place(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, arena: Ranks, *, layout: Layout
) -> Tensor:
    """As `two_shot`, but y_TN is the symmetric buffer: the group's next call overwrites it.

    One synchronisation less. A baseline of the bench, not a form: a caller who keeps y_TN would
    find another call's values in it.
    """
    y_TN = _product_in_buffer(x_TK, weight, arena, layout)
    _sum_in_place(y_TN, arena)
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def two_shot_view(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Ranks,
    *,
    layout: Layout,
) -> Tensor:
    """As `two_shot_in_place`, in two buffers by turns: y_TN holds until the next call but one."""
    memory = _memory_of(arena)
    memory.view_turn = 1 - memory.view_turn
    num_bytes = _num_bytes(_product_shape(x_TK, weight, layout), x_TK.dtype)
    buffers = [_buffer(arena, num_bytes, which) for which in ("view 0", "view 1")]  # grow together
    y_TN = _product_in_buffer(x_TK, weight, arena, layout, buffers[memory.view_turn])
    _sum_in_place(y_TN, arena)
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def _sum_in_place(y_TN: Tensor, arena: Ranks) -> None:
    torch.ops.symm_mem.two_shot_all_reduce_(y_TN, "sum", arena.group.group_name)


def one_shot_all_reduce(x_TD: Tensor, arena: Ranks) -> Tensor:
    """The sum over ranks, in a new tensor; `x_TD` is copied into symmetric memory first."""
    partial_TD = _buffer_as(x_TD.shape, x_TD.dtype, arena).copy_(x_TD)
    y_TD: Tensor = torch.ops.symm_mem.one_shot_all_reduce(partial_TD, "sum", arena.group.group_name)
    return y_TD


def two_shot_all_reduce(x_TD: Tensor, arena: Ranks) -> Tensor:
    """The sum over ranks, in a new tensor; `x_TD` is copied into symmetric memory first."""
    partial_TD = _buffer_as(x_TD.shape, x_TD.dtype, arena).copy_(x_TD)
    y_TD = torch.empty_like(x_TD)
    torch.ops.symm_mem.two_shot_all_reduce_out(partial_TD, "sum", arena.group.group_name, y_TD)
    return y_TD


def reserve(arena: Ranks, num_bytes: int) -> None:
    """Let torch's fused operators have so much symmetric memory. Collective."""
    symm_mem.get_symm_mem_workspace(arena.group.group_name, num_bytes)


@dataclass
class _Memory:
    """What a group has of symmetric memory here.

    buffers    by use; the last is the largest
    view_turn  of the last call of `two_shot_view`
    """

    group: dist.ProcessGroup
    buffers: dict[str, list[Tensor]] = field(default_factory=dict)
    view_turn: int = 1


_memories: dict[str, _Memory] = {}  # by name of the group
_retired: list[dict[str, list[Tensor]]] = []  # of groups that are no more: see `_buffer`


def _memory_of(arena: Ranks) -> _Memory:
    """The memory of this group: a name comes again where groups are destroyed and made anew."""
    group = arena.group
    found = _memories.get(group.group_name)
    if found is None or found.group is not group:
        if found is not None:
            _retired.append(found.buffers)
        found = _memories[group.group_name] = _Memory(group)
    return found


def _product_in_buffer(
    x_TK: Tensor, weight: Tensor, arena: Ranks, layout: Layout, buffer: Tensor | None = None
) -> Tensor:
    shape = _product_shape(x_TK, weight, layout)
    if buffer is None:
        buffer = _buffer(arena, _num_bytes(shape, x_TK.dtype))
    return gemm(x_TK, weight, layout=layout, out_TN=_seen_as(buffer, shape, x_TK.dtype))


def _product_shape(x_TK: Tensor, weight: Tensor, layout: Layout) -> torch.Size:
    return torch.Size((x_TK.shape[0], weight.shape[0 if layout == "NK" else 1]))


def _buffer_as(shape: torch.Size, dtype: torch.dtype, arena: Ranks) -> Tensor:
    return _seen_as(_buffer(arena, _num_bytes(shape, dtype)), shape, dtype)


def _num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _seen_as(buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _buffer(arena: Ranks, num_bytes: int, use: str = "") -> Tensor:
    """Symmetric bytes of the group. Collective where it grows: all ranks ask for the same.

    Buffers that became too small are kept: torch gives freed symmetric memory out again by the
    lowest address of each rank, which may differ between them. Doubling bounds what is kept.
    """
    kept = _memory_of(arena).buffers.setdefault(use, [])
    if not kept or kept[-1].numel() < num_bytes:
        size = max(num_bytes, 2 * kept[-1].numel() if kept else 0)
        kept.append(symm_mem.empty(size, dtype=torch.uint8, device=arena.device))
        symm_mem.rendezvous(kept[-1], arena.group)
    return kept[-1]


def _has_multicast(device: torch.device) -> bool:
    return symm_mem._SymmetricMemory.has_multicast_support(
        torch._C._autograd.DeviceType.CUDA, device.index
    )
