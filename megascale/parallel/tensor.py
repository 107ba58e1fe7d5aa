"""Tensor parallelism with sequence parallelism (MegaScale 2 and 3.2; Korthikanti et al.).

Between linears a rank holds a slice of the token rows, x_tD. A column-parallel linear gathers the
rows and multiplies by its rows of the weight; a row-parallel linear multiplies by its columns and
reduce-scatters the rows. Backward mirrors this; the gather that only the weight gradient needs runs
under the input-gradient GEMM, and the reduce-scatter runs under the weight-gradient GEMM.

`shard_chunk` turns a single-device module tree (on the meta device) into this rank's part: it
shrinks parameters after a table from module path to placement and hangs the parallel operator on
each module's `op`. It knows module paths, `storage_blocks()`, `op_kind` and `op`, not classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale.errors import ConfigError
from megascale.flux.autograd import (
    TensorOps,
    column_parallel_linear,
    row_parallel_linear,
    row_parallel_pair,
)
from megascale.parallel.spans import Span, no_span
from megascale.shards import Block, Box, Placement

VOCAB_MULTIPLE = 64  # rows a rank: keeps the head's GEMM aligned; padding is masked in the loss


@dataclass(frozen=True)
class TensorParallel:
    """The group of this rank, where spans go, and the operators (without: in reference form).

    detail  where spans of the parts of an operator's backward go
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    span: Span = no_span
    ops: TensorOps | None = None
    detail: Span = no_span


@dataclass
class StoredParameter:
    """A parameter of this rank, where it is registered, and the logical blocks inside it.

    places  (module, attribute) pairs; more than one where it is tied inside this chunk
    units   communication units that use it, in order of the chunk
    """

    path: str
    places: list[tuple[nn.Module, str]]
    blocks: tuple[Block, ...]
    units: list[str]

    @property
    def parameter(self) -> nn.Parameter:
        module, attribute = self.places[0]
        parameter = getattr(module, attribute)
        assert isinstance(parameter, nn.Parameter), self.path
        return parameter


# ---------------------------------------------------------------- operators


Operators = dict[tuple[str, Placement], Callable[..., Tensor]]


def linear_operators(tp: TensorParallel) -> Operators:
    """The operators of linear modules by (`op_kind` of the module, placement)."""
    ops = tp.ops or TensorOps.of(tp.group, mode="reference")
    ops = replace(ops, span=tp.span, detail=tp.detail)

    def bind(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *tensors: function(*tensors, ops)

    return {
        ("linear", Placement.COLUMN): bind(column_parallel_linear),
        ("linear", Placement.VOCAB): bind(column_parallel_linear),
        ("linear", Placement.ROW): bind(row_parallel_linear),
        ("pair", Placement.ROW): bind(row_parallel_pair),
    }


# ---------------------------------------------------------------- sharding


def shard_chunk(
    chunk: nn.Module,
    table: Sequence[tuple[str, Placement]],
    units: Sequence[tuple[str, Sequence[str]]],
    tp: TensorParallel,
    *,
    operators: Operators,
    tied: str | None = None,
    tied_copy: bool = False,
) -> list[StoredParameter]:
    """Shrink `chunk` to this rank's shards and return its parameters in module order.

    table         (glob of module path, placement), first match wins
    units         (communication unit, module paths) in order
    operators     what replaces `op`, by (`op_kind` of the module, placement)
    tied          logical parameter that another pipeline stage stores too, if any
    tied_copy     this chunk's storage of it is the copy
    Raises ConfigError where a module with parameters matches no row, or does not divide.
    """
    stored: dict[int, StoredParameter] = {}
    for path, module in chunk.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        placement = _placement(path, table)
        unit = _unit(path, units)
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in stored:  # tied inside this chunk: stored once
                stored[id(parameter)].places.append((module, attribute))
                stored[id(parameter)].units.append(unit)
                continue
            blocks, shape = _blocks(path, module, attribute, parameter, placement, tp)
            blocks = tuple(
                replace(block, tied=True, tied_copy=tied_copy) if block.name == tied else block
                for block in blocks
            )
            local = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
            _replace(chunk, parameter, local)
            stored[id(local)] = StoredParameter(path, [(module, attribute)], blocks, [unit])
        _operator(module, placement, operators)
    return list(stored.values())


def _unit(path: str, units: Sequence[tuple[str, Sequence[str]]]) -> str:
    for name, prefixes in units:
        if any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes):
            return name
    raise AssertionError(f"module {path!r} is in no communication unit of {units}")


def _placement(path: str, table: Sequence[tuple[str, Placement]]) -> Placement:
    for pattern, placement in table:
        if fnmatchcase(path, pattern):
            return placement
    raise ConfigError(
        f"module {path!r} has parameters but no row of the sharding table matches it; "
        "add a row for it"
    )


def _replace(chunk: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put `new` wherever `old` is registered: a tied parameter stays one parameter."""
    for module in chunk.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, name, new)


def _blocks(
    path: str,
    module: Any,
    attribute: str,
    parameter: nn.Parameter,
    placement: Placement,
    tp: TensorParallel,
) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """The logical blocks of one parameter on this rank, and its local shape."""
    columns = tuple(parameter.shape[1:])  # empty for vectors
    whole = placement is Placement.REPLICATED or (
        placement is Placement.ROW and attribute.startswith("bias")
    )
    col_offset = 0
    if placement is Placement.ROW and not whole:
        columns = (_divide(path, "columns", columns[0], tp.size),)
        col_offset = tp.rank * columns[0]
    blocks: list[Block] = []
    local_rows = 0
    for name, rows in module.storage_blocks()[attribute]:
        stored_rows = own_rows = rows
        row_offset = 0
        if placement is Placement.COLUMN:
            stored_rows = own_rows = _divide(name, "rows", rows, tp.size)
            row_offset = tp.rank * own_rows
        elif placement is Placement.VOCAB:
            stored_rows = padded_vocab_rows(rows, tp.size)
            row_offset = min(tp.rank * stored_rows, rows)
            own_rows = min(stored_rows, rows - row_offset)
        offset = (row_offset, col_offset) if columns else (row_offset,)
        blocks.append(
            Block(
                name,
                global_shape=(rows, *parameter.shape[1:]),
                box=Box(offset, (own_rows, *columns)),
                start=local_rows * prod(columns),
                replicated=whole and tp.size > 1,
                counted=not whole or tp.rank == 0,
            )
        )
        local_rows += stored_rows
    return tuple(blocks), (local_rows, *columns)


def padded_vocab_rows(vocab_size: int, tp_size: int) -> int:
    """Vocabulary rows that each rank stores: equal on all, a multiple of VOCAB_MULTIPLE."""
    unit = tp_size * VOCAB_MULTIPLE
    return (vocab_size + unit - 1) // unit * VOCAB_MULTIPLE


def _divide(name: str, what: str, size: int, tp_size: int) -> int:
    if size % tp_size:
        raise ConfigError(
            f"{name} has {size} {what}, which tensor_parallel_size {tp_size} does not divide; "
            "choose a size that divides it"
        )
    return size // tp_size


def _operator(module: Any, placement: Placement, operators: Operators) -> None:
    """Hang the parallel operator on a module that has an `op`, after its `op_kind`."""
    operator = operators.get((getattr(module, "op_kind", ""), placement))
    if operator is not None:
        module.op = operator
