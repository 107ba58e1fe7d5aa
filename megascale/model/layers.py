"""The modules that hold parameters. Each knows its logical names; each can be sharded from outside.

A module's storage tensor is a stack of row blocks, one a logical parameter: q, k and v (or gate
and up, or all of them in the parallel block) are one matrix, so that they are one GEMM.
`storage_blocks` says what each tensor holds. Tensor parallelism replaces a tensor by its shard and
`op` by the operator that communicates; the code here takes widths from tensors, never from the
configuration.

Which operators fit is told by `op_kind`: "linear", "pair" or "lookup".

Weights are `[out, in]`. Creation leaves values undefined: `initialise` fills them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megascale.ops.column_split import Part, split_columns
from megascale.ops.embedding import embedding
from megascale.ops.linear import linear, linear_pair
from megascale.ops.mode import OperatorMode
from megascale.ops.norm import residual_norm

RowBlocks = tuple[tuple[str, int], ...]
"""(logical name, rows) of each block of a storage tensor, in order."""

LinearOp = Callable[[Tensor, Tensor, Tensor | None], Tensor]
PairOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def _parameter(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


def _suffixed(blocks: RowBlocks, suffix: str) -> RowBlocks:
    return tuple((f"{name}.{suffix}", rows) for name, rows in blocks)


class LogicalModule(nn.Module, ABC):
    """A module whose parameters are stacks of logical parameters."""

    @abstractmethod
    def storage_blocks(self) -> dict[str, RowBlocks]:
        """For each parameter attribute, the (logical parameter name, global rows) it stacks."""


class FusedLinear(LogicalModule):
    """One GEMM for several logical linear layers that share an input.

    blocks  (logical module name, output rows) of each
    op      `op(x, weight, bias) -> y`
    """

    op_kind = "linear"

    def __init__(
        self,
        in_features: int,
        blocks: RowBlocks,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        rows = sum(rows for _, rows in blocks)
        self.blocks = blocks
        self.weight = _parameter((rows, in_features), device, dtype)
        self.bias = _parameter((rows,), device, dtype) if bias else None
        self.op: LinearOp = linear

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.op(x_TD, self.weight, self.bias)

    def product(self, x_TD: Tensor) -> Tensor:
        """The output without the bias, for a consumer that adds `self.bias` itself."""
        return self.op(x_TD, self.weight, None)

    def split(
        self, y: Tensor, sizes_of: tuple[int, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Part, ...]]:
        """Cut an output into groups of `sizes_of` consecutive blocks, in their own proportions:
        `ops/column_split.py`."""
        total = sum(rows for _, rows in self.blocks)
        widths, first = [], 0
        for count in sizes_of:
            rows = sum(rows for _, rows in self.blocks[first : first + count])
            widths.append(rows * y.shape[-1] // total)
            first += count
        assert sum(widths) == y.shape[-1], (widths, y.shape, self.blocks)
        return split_columns(y, widths)

    def storage_blocks(self) -> dict[str, RowBlocks]:
        stored = {"weight": _suffixed(self.blocks, "weight")}
        if self.bias is not None:
            stored["bias"] = _suffixed(self.blocks, "bias")
        return stored

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {dict(self.blocks)}, bias={self.bias is not None}"


class RowPair(LogicalModule):
    """Two linear layers with a common output, summed: the exit of the parallel block.

    op  `op(a, weight_a, b, weight_b, bias) -> a @ weight_a^T + b @ weight_b^T + bias`; `bias` is
        the sum of both biases, an ordinary tensor of the graph
    """

    op_kind = "pair"

    def __init__(
        self,
        name_a: str,
        in_a: int,
        name_b: str,
        in_b: int,
        out_features: int,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.names = (name_a, name_b)
        self.out_features = out_features
        self.weight_a = _parameter((out_features, in_a), device, dtype)
        self.weight_b = _parameter((out_features, in_b), device, dtype)
        self.bias_a = _parameter((out_features,), device, dtype) if bias else None
        self.bias_b = _parameter((out_features,), device, dtype) if bias else None
        self.op: PairOp = linear_pair

    def forward(self, a_TI: Tensor, b_TJ: Tensor) -> Tensor:
        bias = None
        if self.bias_a is not None and self.bias_b is not None:
            bias = self.bias_a + self.bias_b
        return self.op(a_TI, self.weight_a, b_TJ, self.weight_b, bias)

    def storage_blocks(self) -> dict[str, RowBlocks]:
        stored: dict[str, RowBlocks] = {}
        for name, letter in zip(self.names, "ab", strict=True):
            stored[f"weight_{letter}"] = ((f"{name}.weight", self.out_features),)
            if self.bias_a is not None:
                stored[f"bias_{letter}"] = ((f"{name}.bias", self.out_features),)
        return stored


class VocabEmbedding(LogicalModule):
    """A lookup table, `[V, D]`; `op(tokens_T, weight) -> y_TD`."""

    op_kind = "lookup"

    def __init__(
        self, name: str, rows: int, hidden: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name, self.rows = name, rows
        self.weight = _parameter((rows, hidden), device, dtype)
        self.op: Callable[[Tensor, Tensor], Tensor] = embedding

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.op(tokens_T, self.weight)

    def storage_blocks(self) -> dict[str, RowBlocks]:
        return {"weight": ((f"{self.name}.weight", self.rows),)}


class Norm(LogicalModule):
    """LayerNorm ("layernorm": weight and bias) or RMSNorm ("rmsnorm": weight) of the last axis."""

    def __init__(
        self, name: str, kind: str, size: int, eps: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name, self.size, self.eps = name, size, eps
        self.weight = _parameter((size,), device, dtype)
        self.bias = _parameter((size,), device, dtype) if kind == "layernorm" else None

    def forward(
        self, x_TD: Tensor, branch_TD: Tensor | None, mode: OperatorMode
    ) -> tuple[Tensor, Tensor]:
        """(x + branch, its norm): `ops/norm`."""
        return residual_norm(x_TD, branch_TD, self.weight, self.bias, self.eps, mode)

    def storage_blocks(self) -> dict[str, RowBlocks]:
        stored: dict[str, RowBlocks] = {"weight": ((f"{self.name}.weight", self.size),)}
        if self.bias is not None:
            stored["bias"] = ((f"{self.name}.bias", self.size),)
        return stored
