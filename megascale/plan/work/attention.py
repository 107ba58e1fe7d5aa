"""The attention core and what stands around it: heads, rotary positions, scores in memory.

"flash" is one operation whose price a cluster file knows. "scores" is the core before it: two
products a direction and the S x S matrix of each head through memory, its softmax a kernel that
skips what the mask hides (Megatron-LM's: it reads a half of the scores and writes all of them), or
in plain operators a kernel each for scale, mask and softmax.
"""

from __future__ import annotations

from megascale.plan.work.operations import Attention, Direction, Gemm, MemoryPass, Operation, Work
from megascale.plan.work.shape import RankShape


def attention_forward(shape: RankShape) -> Work:
    """From the fused projection to the input of o."""
    return (*_heads(shape), *(_scores_forward(shape) if shape.scores else (_flash(shape, False),)))


def attention_backward(shape: RankShape) -> Work:
    """And back: the gradients of q, k and v are joined to one matrix by a pass of their own."""
    core = _scores_backward(shape) if shape.scores else (_flash(shape, True),)
    return (*core, MemoryPass("heads_backward", 2 * shape.column_bytes(shape.qkv)))


def _flash(shape: RankShape, backward: bool) -> Attention:
    model = shape.model
    return Attention(
        "attention_backward" if backward else "attention",
        shape.micro_batch_size,
        shape.seq_len,
        shape.heads,
        shape.kv_heads,
        model.dim_per_head,
        model.attention_window,
        backward,
        shape.plain,
    )


def _heads(shape: RankShape) -> Work:
    """Rotary positions: q, k and v read and written. Without them they are views."""
    model = shape.model
    if model.position != "rope" and not model.qk_norm:
        return ()
    # plain: q and k are cut in halves, four products, two sums, a cat; v is copied
    passes, kernels = (8, 12) if shape.plain else (2, 1)
    return (MemoryPass("heads", passes * shape.column_bytes(shape.qkv), kernels),)


def _scores_bytes(shape: RankShape) -> float:
    return float(
        shape.dtype_bytes * shape.micro_batch_size * shape.heads * shape.seq_len * shape.seq_len
    )


def _scores_gemm(shape: RankShape, name: str, columns: int, depth: int, back: bool) -> Gemm:
    """A product of all heads: rows of all of them, one after the other."""
    rows = shape.micro_batch_size * shape.heads * shape.seq_len
    direction = Direction.DGRAD if back else Direction.FORWARD
    return Gemm(name, rows, columns, depth, direction, shape.dtype_bytes)


def _scores_forward(shape: RankShape) -> Work:
    head, seq = shape.model.dim_per_head, shape.seq_len
    one = _scores_bytes(shape)
    passes, kernels = (6.5, 3) if shape.plain else (1.5, 1)  # plain: scale 2, mask 2.5, softmax 2
    operations: list[Operation] = [
        _scores_gemm(shape, "scores", seq, head, False),
        MemoryPass("scores_softmax", passes * one, kernels),
    ]
    if shape.model.attention_dropout > 0:
        operations.append(MemoryPass("scores_dropout", 2 * one + one / shape.dtype_bytes))
    return (*operations, _scores_gemm(shape, "values", head, seq, False))


def _scores_backward(shape: RankShape) -> Work:
    """Gradients of values and probabilities; dropout and softmax; gradients of q and k."""
    head, seq = shape.model.dim_per_head, shape.seq_len
    one = _scores_bytes(shape)
    passes, kernels = (7.5, 3) if shape.plain else (2, 1)
    operations: list[Operation] = [
        _scores_gemm(shape, "values.v", head, seq, True),
        _scores_gemm(shape, "values.p", seq, head, True),
    ]
    if shape.model.attention_dropout > 0:
        operations.append(MemoryPass("scores_dropout", 2 * one + one / shape.dtype_bytes))
    return (
        *operations,
        MemoryPass("scores_softmax_backward", passes * one, kernels),
        _scores_gemm(shape, "scores.q", head, seq, True),
        _scores_gemm(shape, "scores.k", head, seq, True),
    )
