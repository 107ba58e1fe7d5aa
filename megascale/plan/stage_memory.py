"""Sizes of a stage's tensors: what `memory.py` walks over and `step_memory.py` puts in formulas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megascale.config import ModelConfig
from megascale.plan.case import Case
from megascale.plan.parameters import LogicalParameter, chunk_parameters
from megascale.plan.schedules.transfers import PREFETCH_COMPUTES, SEND_WINDOW
from megascale.plan.stages import split_layers
from megascale.plan.work.ends import vocabulary_rows
from megascale.plan.work.kept import (
    backward_moment_bytes,
    deferred_bytes,
    forward_moment_bytes,
    kept_bytes,
)
from megascale.plan.work.layer import layer_work_of
from megascale.plan.work.operations import Attention, MemoryPass
from megascale.plan.work.shape import RankShape, rank_shape
from megascale.shards import Placement

_MAIN_BYTES = 4
_BUCKETS_IN_FLIGHT = 2  # ZeRO-2: one that backward fills and one being reduced
_GATHERED_UNITS = 2  # ZeRO-3: a bucket that is computed with, and the next
_WORKSPACES = 2  # of cuBLAS: one of the thread that runs forward, one of autograd's
_WORKSPACE_BYTES = 32 << 20  # of each, on Hopper
LAUNCH_QUEUE = 1024  # entries by which a host may be ahead of a stream
EVENTS_A_PASS = 12  # entries of a chunk's pass beside kernels: spans, and waits of streams
_SLOTS = 4  # `flux/arena.py`
_FLAG_BYTES = 4 << 20  # of a slot


@dataclass(frozen=True)
class EndSizes:
    """Beside layers, of one micro-batch: the last chunk's norm, the head with its loss.

    norm      kept of the final norm: its input and output
    logits    of the own rows of the vocabulary
    forward   for a moment, logits included; `backward` likewise
    deferred  where the head's weight gradient waits
    """

    norm: float
    logits: float
    forward: float
    backward: float
    deferred: float


@dataclass(frozen=True)
class StageSizes:
    """Of one stage; kept, deferred and moments by chunk, of a micro-batch.

    elements  parameters of a tensor rank
    logits    of the head that the stage holds, or its part
    """

    elements: int
    kept: dict[int, float]
    deferred: dict[int, float]
    forward_moment: dict[int, float]
    backward_moment: dict[int, float]
    logits: float


def stage_sizes(case: Case, stage: int) -> StageSizes:
    layout, shape = case.layout, rank_shape(case)
    layers = split_layers(case.job.model.num_layers, layout.num_chunks)
    held = range(stage, layout.num_chunks, layout.pipeline)
    kept, deferred = kept_bytes(shape), deferred_bytes(shape)
    ends = end_sizes(shape, layout.pipeline if layout.share_head else 1)
    last = layout.num_chunks - 1
    with_head = last in held and not layout.share_head
    sizes = StageSizes(
        elements=stage_elements(case, stage),
        kept={c: len(layers[c]) * kept + (ends.norm if c == last else 0.0) for c in held},
        deferred={
            c: len(layers[c]) * deferred
            + (ends.deferred if c == last and with_head else 0.0)
            + (shape.hidden_bytes if c == 0 else 0.0)  # the embedding's, gathered
            for c in held
        },
        forward_moment=dict.fromkeys(held, forward_moment_bytes(shape)),
        backward_moment=dict.fromkeys(held, backward_moment_bytes(shape)),
        logits=ends.logits if with_head or layout.share_head else 0.0,
    )
    if with_head:
        sizes.forward_moment[last] = max(sizes.forward_moment[last], ends.forward)
        sizes.backward_moment[last] = max(sizes.backward_moment[last] - ends.norm, ends.backward)
    if layout.share_head:
        sizes.deferred[layout.num_chunks] = ends.deferred
        sizes.backward_moment[layout.num_chunks] = max(ends.forward, ends.backward)
    return sizes


@lru_cache(maxsize=4096)
def end_sizes(shape: RankShape, stages: int) -> EndSizes:
    """With a vocabulary split over `stages` and tensor ranks.

    Backward: the logits' gradient lies in the logits' place; input and gradient of all tokens
    beside it where forms allocate them, and the result. Plain cross-entropy has three fp32 copies
    and a mask of a byte an element.
    """
    own = shape.own_hidden_bytes
    split = shape.tensor > 1
    whole = shape.hidden_bytes if split and not shape.symmetric else 0.0
    columns = vocabulary_rows(shape.model.vocab, shape.tensor * stages)
    logits = shape.column_bytes(columns)
    loss = (3 * _MAIN_BYTES + 1) * shape.tokens * columns if shape.plain else 0
    received = 2 * own if stages > 1 else 0.0  # hidden states on every stage, and their gradient
    hidden = shape.hidden_bytes if shape.halves == "joined" else own
    return EndSizes(
        norm=2 * own,
        logits=logits,
        forward=received + logits + max(whole, loss),
        backward=received + logits + max(2 * whole + own, loss),
        deferred=hidden + logits,
    )


def stage_elements(case: Case, stage: int) -> int:
    """Parameters of a tensor rank of a stage."""
    layout = case.layout
    base, larger = divmod(case.job.model.num_layers, layout.num_chunks)
    held = range(stage, layout.num_chunks, layout.pipeline)
    num_layers = sum(base + (chunk < larger) for chunk in held)
    return part_elements(case, num_layers, first=stage == 0, last=stage == layout.pipeline - 1)


def part_elements(case: Case, num_layers: int, *, first: bool, last: bool) -> int:
    """Of `num_layers` layers, with the embedding and what the last stage has where asked."""
    model, layout = case.job.model, case.layout
    positions = model.max_seq_len or case.job.seq_len
    stages = layout.pipeline if layout.share_head else 1
    elements = num_layers * _elements(model, layout.tensor, 1, False, False, positions)
    elements += _elements(model, layout.tensor, 0, first, last and stages == 1, positions)
    if stages > 1:
        part = LogicalParameter(
            "head.weight", (model.vocab, model.hidden_size), Placement.VOCAB, stages
        )
        elements += part.local_elements(layout.tensor)
        elements += model.hidden_size * (2 if model.norm == "layernorm" else 1) * last
    return elements


@lru_cache(maxsize=4096)
def _elements(
    model: ModelConfig, tensor: int, num_layers: int, embed: bool, head: bool, positions: int
) -> int:
    parameters = chunk_parameters(
        model, range(num_layers), embed=embed, head=head, num_positions=positions
    )
    return sum(parameter.local_elements(tensor) for parameter in parameters)


def parameter_bytes(case: Case, elements: float, bucket_elements: float) -> float:
    """Whole, or with ZeRO-3 a shard and the buckets that are gathered."""
    each, data = case.job.dtype_bytes, case.layout.data
    if case.layout.zero_stage < 3 or data == 1:
        return each * elements
    return each * (-(-elements // data) + min(elements, _GATHERED_UNITS * bucket_elements))


def main_gradient_bytes(case: Case, elements: float, bucket_elements: float) -> float:
    """fp32 (fp64 for fp64): whole, or from ZeRO-2 on a shard and the buckets in flight."""
    each, data = max(_MAIN_BYTES, case.job.dtype_bytes), case.layout.data
    if case.layout.zero_stage < 2 or data == 1:
        return each * elements
    return each * (-(-elements // data) + min(elements, _BUCKETS_IN_FLIGHT * bucket_elements))


def reduction_bytes(case: Case, bucket_elements: float) -> float:
    """Gradients that travel in bf16 (`parallel/reduce_scatter.py`): a copy of a bucket that is sent
    and one that is received; on CUDA one bucket's at a time, in the order of a stream. In the main
    dtype they travel in place."""
    if case.software.grad_reduce_bytes >= _MAIN_BYTES or case.layout.data == 1:
        return 0.0
    return 2 * case.software.grad_reduce_bytes * bucket_elements


def optimizer_bytes(case: Case, elements: float) -> float:
    """Two moments, and a master copy where the parameters are not themselves the master."""
    each = max(_MAIN_BYTES, case.job.dtype_bytes)
    copies = 3 if case.job.dtype_bytes < _MAIN_BYTES else 2
    ranks = case.layout.data if case.layout.zero_stage > 0 else 1
    return copies * each * -(-elements // ranks)


def transfer_bytes(case: Case, stage: int) -> float:
    """Hidden states on their way between stages.

    A receive ahead and two windows of sends; and, where transfers are not waited for by the host,
    what the allocator cannot hand out again before the host knows that it has arrived or left: the
    host is ahead by as many launches as a stream's queue holds.
    """
    layout = case.layout
    if layout.pipeline == 1:
        return 0.0
    shape = rank_shape(case)
    sent = 2.0 * SEND_WINDOW
    if case.software.transfers == "decoupled":
        passes = 2 * layout.virtual * case.micro_batches
        layers = case.job.model.num_layers / layout.num_chunks
        entries = layers * layer_kernels(shape) / 2 + EVENTS_A_PASS
        ahead = min(passes, LAUNCH_QUEUE / entries)
        away = ahead * _transfers_a_pass(layout.num_chunks, layout.pipeline, stage)
        sent = max(sent, away)
    return (1 + PREFETCH_COMPUTES + sent) * shape.own_hidden_bytes


def _transfers_a_pass(num_chunks: int, stages: int, stage: int) -> float:
    """Sends and received gradients of a stage for each forward and backward of a chunk: a received
    activation is kept anyway."""
    held = range(stage, num_chunks, stages)
    last = num_chunks - 1
    transfers = sum(2 * (chunk < last) + (chunk > 0) for chunk in held)
    return transfers / (2 * len(held))


@lru_cache(maxsize=4096)
def layer_kernels(shape: RankShape) -> int:
    """Kernels of a layer's forward and backward for a micro-batch."""
    work = layer_work_of(shape)
    return sum(
        op.kernels if isinstance(op, MemoryPass) else 3 if isinstance(op, Attention) else 1
        for part in (work.forward, work.recompute, work.backward_input, work.backward_weight)
        for op in part
    )


def library_bytes() -> int:
    """Workspaces of cuBLAS."""
    return _WORKSPACES * _WORKSPACE_BYTES


def symmetric_bytes(case: Case) -> float:
    """Slots that hold the largest call: gathered or scattered hidden states; and their flags."""
    shape = rank_shape(case)
    if shape.tensor == 1 or not shape.symmetric:
        return 0.0
    return _SLOTS * (shape.hidden_bytes + _FLAG_BYTES)
