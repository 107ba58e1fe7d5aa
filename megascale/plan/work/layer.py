"""Operations of one transformer layer on one rank, as the program runs them (MegaScale 3.1 to 3.3).

Serial block: norm, qkv, attention, o; norm, fc1, activation, fc2: two gathers in and two reductions
out. Parallel block: one norm, qkv and fc1 as one product, o and fc2 as one sum: one gather in and
one reduction out. Sizes follow `model/block.py` and `ops/`; what an operation reads and writes is
said where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megascale.plan.case import Case
from megascale.plan.work.attention import attention_backward, attention_forward
from megascale.plan.work.elementwise import (
    activation_backward,
    activation_forward,
    add,
    dropout,
    norm_backward,
    norm_forward,
)
from megascale.plan.work.linear import (
    Backward,
    column_backward,
    column_forward,
    pair_forward,
    row_backward,
    row_forward,
)
from megascale.plan.work.operations import MemoryPass, Work
from megascale.plan.work.shape import RankShape, rank_shape


@dataclass(frozen=True)
class LayerWork:
    """One micro-batch through one layer. `recompute` is what backward needs again first."""

    forward: Work
    recompute: Work
    backward_input: Work
    backward_weight: Work


def layer_work(case: Case) -> LayerWork:
    """The operations of a layer of `case`; all its layers are alike."""
    return layer_work_of(rank_shape(case))


@lru_cache(maxsize=4096)
def layer_work_of(shape: RankShape) -> LayerWork:
    """The operations of a layer of that shape."""
    if shape.model.block == "serial":
        forward, backward = _serial_forward(shape), _serial_backward(shape)
    else:
        forward, backward = _parallel_forward(shape), _parallel_backward(shape)
    return LayerWork(forward, _recompute(shape, forward), backward.inputs, backward.weights)


def _serial_forward(shape: RankShape) -> Work:
    return (
        *norm_forward(shape, branch=shape.recompute != "full"),
        *column_forward(shape, "qkv", shape.qkv),
        *attention_forward(shape),
        *row_forward(shape, "o", shape.query),
        *dropout(shape),
        *norm_forward(shape),
        *column_forward(shape, "fc1", shape.ffn_in),
        *activation_forward(shape),
        *row_forward(shape, "fc2", shape.ffn),
        *dropout(shape),
        *(add(shape) if shape.recompute == "full" else ()),  # a layer that ends with its own sum
    )


def _parallel_forward(shape: RankShape) -> Work:
    return (
        *norm_forward(shape, branch=shape.recompute != "full"),
        *column_forward(shape, "in", shape.qkv + shape.ffn_in),
        *attention_forward(shape),
        *activation_forward(shape),
        *pair_forward(shape, ("o", shape.query), ("fc2", shape.ffn)),
        *dropout(shape),
        *(add(shape) if shape.recompute == "full" else ()),
    )


def _serial_backward(shape: RankShape) -> Backward:
    bias = shape.model.bias
    fused = not shape.plain  # fc1's bias gradient is summed on the activation's way
    return _joined(
        dropout(shape, backward=True),
        row_backward(shape, (("fc2", shape.ffn),), bias=bias == "all"),
        activation_backward(shape),
        column_backward(shape, "fc1", shape.ffn_in, bias=bias == "all" and not fused),
        norm_backward(shape),
        dropout(shape, backward=True),
        row_backward(shape, (("o", shape.query),), bias=bias == "all"),
        attention_backward(shape),
        column_backward(shape, "qkv", shape.qkv, bias=bias != "none"),
        norm_backward(shape),
    )


def _parallel_backward(shape: RankShape) -> Backward:
    bias = shape.model.bias == "all"
    columns = shape.qkv + shape.ffn_in
    # plain operators do not write their gradients in the places of `ops/column_split.py`
    placed = (MemoryPass("copy", 2 * shape.column_bytes(columns), kernels=2),)
    return _joined(
        dropout(shape, backward=True),
        row_backward(shape, (("o", shape.query), ("fc2", shape.ffn)), bias=bias),
        activation_backward(shape),
        attention_backward(shape),
        placed if shape.plain else (),
        column_backward(shape, "in", columns, bias=bias),
        norm_backward(shape),
    )


def _joined(*parts: Backward | Work) -> Backward:
    """Parts in the order of backward; what touches no weight belongs to the inputs' half."""
    inputs: Work = ()
    weights: Work = ()
    for part in parts:
        if isinstance(part, Backward):
            inputs, weights = inputs + part.inputs, weights + part.weights
        else:
            inputs += part
    return Backward(inputs, weights)


def _recompute(shape: RankShape, forward: Work) -> Work:
    """What backward makes again.

    full: the forward with its collectives. selective: the activation, and the attention core where
    its scores go through memory (flash kernels make theirs again anyway). attention: the latter.
    """
    if shape.recompute == "full":
        return forward
    core = attention_forward(shape) if shape.scores else ()
    if shape.recompute == "attention":
        return core
    return (*core, *activation_forward(shape)) if shape.recompute == "selective" else ()
