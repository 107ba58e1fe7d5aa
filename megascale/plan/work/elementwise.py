"""Passes over memory between the products: norms, activation, dropout, sums (MegaScale 3.3).

"Fused" is `ops/`: a norm takes the residual sum with it both ways, the activation its bias. "Plain"
is a kernel an operation, as torch runs them: what the paper's fused operators replace.
Bytes are what a kernel reads and writes once; statistics of 8 bytes a row are left out.
"""

from __future__ import annotations

from megascale.plan.work.operations import MemoryPass, Work
from megascale.plan.work.shape import RankShape


def norm_forward(shape: RankShape, *, branch: bool = True) -> Work:
    """Sum with the branch, and norm. Fused: reads stream and branch, writes sum and norm."""
    one = shape.own_hidden_bytes
    if not shape.plain:
        return (MemoryPass("norm", (4 if branch else 2) * one),)
    norm = MemoryPass("norm", 2 * one)
    return (*add(shape), norm) if branch else (norm,)


def norm_backward(shape: RankShape, *, meets: bool = True) -> Work:
    """Fused: reads the sum and both gradients, writes one; weight and bias gradients on the way.

    meets  the stream's own gradient is added
    Plain: input gradient (3), weight and bias (2), and the two gradients' sum (3).
    """
    one = shape.own_hidden_bytes
    if not shape.plain:
        return (MemoryPass("norm_backward", (4 if meets else 3) * one, kernels=2),)
    passes = MemoryPass("norm_backward", 5 * one, kernels=3)
    return (passes, *add(shape)) if meets else (passes,)


def activation_forward(shape: RankShape) -> Work:
    """Fused: reads the input, writes the result. Plain swiglu: silu and product, a kernel each."""
    wide, result = shape.column_bytes(shape.ffn_in), shape.column_bytes(shape.ffn)
    if shape.plain and shape.model.gated:
        return (MemoryPass("activation", 5 * result, kernels=2),)
    return (MemoryPass("activation", wide + result),)


def activation_backward(shape: RankShape) -> Work:
    """Fused: reads input and the result's gradient, writes the input's.

    Plain swiglu: the product's two gradients (3 each, and silu once more: 2), silu's (3), and
    `cat` (4).
    """
    wide, result = shape.column_bytes(shape.ffn_in), shape.column_bytes(shape.ffn)
    if shape.plain and shape.model.gated:
        return (MemoryPass("activation_backward", 15 * result, kernels=5),)
    return (MemoryPass("activation_backward", 2 * wide + result),)


def add(shape: RankShape) -> Work:
    """Two hidden states to one."""
    return (MemoryPass("add", 3 * shape.own_hidden_bytes),)


def dropout(shape: RankShape, *, backward: bool = False) -> Work:
    """Of a branch: the mask is made of counters, so it is neither read nor written, but where
    software keeps masks of a byte an element.

    Plain: the mask is made (1 byte an element written, then read) and multiplied.
    """
    if shape.model.hidden_dropout == 0.0:
        return ()
    one = shape.own_hidden_bytes
    name = "dropout_backward" if backward else "dropout"
    mask = one / shape.dtype_bytes
    if not shape.plain:
        return (MemoryPass(name, 2 * one + (mask if shape.masks else 0.0)),)
    return (MemoryPass(name, 2 * one + 2 * mask, kernels=2),)
