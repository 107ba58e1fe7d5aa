"""What the first and the last chunk do beside their layers: lookup, final norm, head, loss.

The vocabulary is split over tensor ranks, and over stages too with a shared head
(`parallel/shared_head.py`): each part is padded as `parallel/tensor.py` does. Cross-entropy over it
exchanges three numbers a token. Fused, its logits are read once forward and read and written once
backward (`ops/cross_entropy`); plain, torch's operations on fp32 copies, a kernel each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megascale.plan.case import Case
from megascale.plan.work.elementwise import dropout, norm_backward, norm_forward
from megascale.plan.work.layer import LayerWork
from megascale.plan.work.linear import column_backward, column_forward
from megascale.plan.work.operations import Collective, MemoryPass, Operation, Transfer, Work
from megascale.plan.work.shape import RankShape, rank_shape

VOCAB_MULTIPLE = 64  # `parallel/tensor.py`: rows of a part
_MAIN_BYTES = 4
_ROW_INDEX_BYTES = 8


def vocabulary_rows(vocab: int, parts: int) -> int:
    """Rows of the vocabulary that each of `parts` ranks stores."""
    unit = parts * VOCAB_MULTIPLE
    return -(-vocab // unit) * VOCAB_MULTIPLE


def embedding_work(case: Case) -> LayerWork:
    """Of the first chunk."""
    return embedding_work_of(_as_end(rank_shape(case)))


@lru_cache(maxsize=4096)
def embedding_work_of(shape: RankShape) -> LayerWork:
    """Lookup, positions, dropout; the gradient's rows are added to the fp32 main gradient."""
    whole, own = shape.hidden_bytes, shape.own_hidden_bytes
    wide = _MAIN_BYTES / shape.dtype_bytes * whole
    forward: list[Operation] = [MemoryPass("embedding", 2 * whole)]
    backward: list[Operation] = []
    if shape.tensor > 1:  # rows of other ranks become zeros before the sum
        forward += [MemoryPass("embedding", 2 * whole), _sum_rows(shape)]
        backward += [*_gather_rows(shape), MemoryPass("embedding", 2 * whole)]
    if shape.model.position == "learned":
        forward.append(MemoryPass("embedding", 5 * own, kernels=2))
        backward.append(_rows_added(own, wide * own / whole, shape))
    backward.append(_rows_added(whole, wide, shape))
    return LayerWork(
        (*forward, *dropout(shape)), (), (*dropout(shape, backward=True), *backward), ()
    )


def _rows_added(num_bytes: float, wide: float, shape: RankShape) -> MemoryPass:
    """Cast to fp32; rows sorted; read, and the table's rows read and written."""
    index = 4 * _ROW_INDEX_BYTES * num_bytes / (shape.dtype_bytes * shape.model.hidden_size)
    return MemoryPass("embedding", num_bytes + wide + 3 * wide + index, kernels=6)


def _sum_rows(shape: RankShape) -> Collective:
    kind = Transfer.REDUCE_SCATTER if shape.sequence_parallel else Transfer.ALL_REDUCE
    return Collective("embedding.reduce", kind, shape.hidden_bytes, "tensor")


def _gather_rows(shape: RankShape) -> Work:
    if not shape.sequence_parallel:
        return ()
    return (Collective("embedding.gather", Transfer.ALL_GATHER, shape.hidden_bytes, "tensor"),)


def head_work(case: Case) -> LayerWork:
    """Final norm, head and loss: of the last chunk."""
    return head_work_of(_as_end(rank_shape(case)), case.layout.tensor)


def shared_head_work(case: Case) -> LayerWork:
    """Head and loss of a stage that shares them; the final norm stays in the last chunk."""
    shape = _as_end(rank_shape(case))
    layout = case.layout
    work = head_work_of(shape, layout.tensor * layout.pipeline, norm=False)
    joined = replace(shape, halves=rank_shape(case).halves, joined=layout.join_weight_gradients)
    rows = vocabulary_rows(shape.model.vocab, layout.tensor * layout.pipeline)
    weight = column_backward(joined, "head", rows, bias=False).weights
    spread, summed = (
        Collective(f"head.{name}", Transfer.ALL_REDUCE, shape.own_hidden_bytes / 2, "pipeline")
        for name in ("broadcast", "sum")  # each moves what half an all-reduce does
    )
    return LayerWork((spread, *work.forward), (), (*work.backward_input, summed), weight)


def final_norm_work(case: Case) -> LayerWork:
    """The last chunk's end with a shared head."""
    shape = _as_end(rank_shape(case))
    return LayerWork(norm_forward(shape), (), norm_backward(shape, meets=False), ())


@lru_cache(maxsize=4096)
def head_work_of(shape: RankShape, parts: int, *, norm: bool = True) -> LayerWork:
    """Head and loss over one of `parts` of the vocabulary."""
    rows = vocabulary_rows(shape.model.vocab, parts)
    backward = column_backward(shape, "head", rows, bias=False)
    return LayerWork(
        (
            *(norm_forward(shape) if norm else ()),
            *column_forward(shape, "head", rows),
            *_loss_forward(shape, rows, parts),
        ),
        (),
        (
            *_loss_backward(shape, rows),
            *backward.inputs,
            *(norm_backward(shape, meets=False) if norm else ()),
        ),
        backward.weights,
    )


def _loss_forward(shape: RankShape, rows: int, parts: int) -> Work:
    """Fused: one reading. Plain: to fp32, maximum, difference, exponential, sum."""
    one = float(shape.dtype_bytes * shape.tokens * rows)
    wide = float(_MAIN_BYTES * shape.tokens * rows)
    passes = (
        MemoryPass("cross_entropy", one + 7 * wide, kernels=12)
        if shape.plain
        else MemoryPass("cross_entropy", one, kernels=8)
    )
    if parts == 1:
        return (passes,)
    token = float(_MAIN_BYTES * shape.tokens)
    return (
        passes,
        Collective("loss.maximum", Transfer.ALL_REDUCE, token, "tensor"),
        Collective("loss.sums", Transfer.ALL_REDUCE, 2 * token, "tensor"),
    )


def _loss_backward(shape: RankShape, rows: int) -> Work:
    """Fused: the gradient over the logits. Plain: to fp32, difference, exponential, the label's
    one, scale, mask, and back."""
    one = float(shape.dtype_bytes * shape.tokens * rows)
    wide = float(_MAIN_BYTES * shape.tokens * rows)
    if shape.plain:
        return (MemoryPass("cross_entropy_backward", 2 * one + 12 * wide, kernels=10),)
    return (MemoryPass("cross_entropy_backward", 2 * one, kernels=3),)


def _as_end(shape: RankShape) -> RankShape:
    """Embedding and head are neither recomputed nor, in whole backwards, cut."""
    return replace(shape, recompute="none")
