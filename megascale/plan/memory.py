"""Predicted memory of a rank, from configuration and mesh alone.

Persistent state follows ZeRO (1910.02054) as `parallel/zero.py` stores it; what layers keep and
operators need for a moment is in `work/kept.py` (2205.05198). What is in flight is not a formula:
the very actions of the stage are walked, and at each the moment's need is added to what is kept.
Where backward is cut in halves, or weight gradients of several micro-batches are joined, the
operands of the weights' half stay until it runs: each linear's input and its output's gradient.

Not counted: the allocator's reserve (what fragmentation costs), CUDA's context, NCCL's buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megascale.config import ModelConfig, RunConfig
from megascale.plan.actions import INPUT_GRADIENTS, Action, ActionKind
from megascale.plan.buckets import stage_buckets
from megascale.plan.case import Case, Recompute, case_of
from megascale.plan.parameters import LogicalParameter, chunk_parameters
from megascale.plan.schedules import build_stage
from megascale.plan.stage_memory import (
    StageSizes,
    library_bytes,
    main_gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    reduction_bytes,
    stage_sizes,
    symmetric_bytes,
    transfer_bytes,
)
from megascale.plan.stages import split_layers
from megascale.plan.work.kept import kept_per_token
from megascale.shards import Placement
from megascale.topology import Mesh


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; all ranks of a stage are alike.

    activation  kept for backward, and operands of weight gradients that wait, at their most
    logits      of one micro-batch
    working     what operators need for a moment beside both, at the worst one
    transfer    hidden states between stages that are under way, or not known to have arrived
    library     workspaces of the matrix library
    fragment    the largest tensor's place (the logits'), of which smaller tensors took pieces, so
                that the allocator holds another of its size
    symmetric   buffers that tensor ranks share, outside the allocator
    """

    parameter_bytes: int
    main_gradient_bytes: int
    reduction_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    logits_bytes: int
    working_bytes: int
    transfer_bytes: int
    library_bytes: int
    fragment_bytes: int
    symmetric_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def allocator_bytes(self) -> int:
        """What torch's allocator holds of it."""
        return self.total_bytes - self.symmetric_bytes


def stage_chunks(config: RunConfig, stage: int) -> list[list[LogicalParameter]]:
    """The logical parameters of each chunk of a stage; a shared head is one more."""
    par, model = config.parallelism, config.model
    layers = split_layers(model.num_layers, par.num_chunks)
    chunks = [
        chunk_parameters(
            model,
            layers[chunk],
            embed=chunk == 0,
            head=chunk == par.num_chunks - 1,
            num_positions=config.learned_positions,
        )
        for chunk in range(stage, par.num_chunks, par.pipeline_parallel_size)
    ]
    if not par.share_head:
        return chunks
    shape = model.vocab, model.hidden_size
    part = LogicalParameter("head.weight", shape, Placement.VOCAB, par.pipeline_parallel_size)
    return [*([p for p in chunk if p.name != part.name] for chunk in chunks), [part]]


def predict_memory(config: RunConfig, mesh: Mesh, stage: int) -> RankMemory:
    """Memory of a rank of `stage` at the worst moment of a step of the full global batch."""
    return case_memory(case_of(config, mesh.world_size), stage)


def case_memory(case: Case, stage: int) -> RankMemory:
    """The same, of a case."""
    sizes = stage_sizes(case, stage)
    bucket = max(b.elements for held in stage_buckets(case, stage).values() for b in held)
    limit = case.software.bucket_mb * 1e6 / max(4, case.job.dtype_bytes)
    bucket_elements = min(sizes.elements, max(bucket, limit))
    most, peak = _most_alive(_actions(case, stage), sizes, case.layout.join_weight_gradients)
    return RankMemory(
        parameter_bytes=round(parameter_bytes(case, sizes.elements, bucket_elements)),
        main_gradient_bytes=round(main_gradient_bytes(case, sizes.elements, bucket_elements)),
        reduction_bytes=round(reduction_bytes(case, bucket_elements)),
        optimizer_bytes=round(optimizer_bytes(case, sizes.elements)),
        activation_bytes=round(most),
        logits_bytes=round(min(sizes.logits, peak - most)),
        working_bytes=round(max(0.0, peak - most - sizes.logits)),
        transfer_bytes=round(transfer_bytes(case, stage)),
        library_bytes=library_bytes(),
        fragment_bytes=round(sizes.logits),
        symmetric_bytes=round(symmetric_bytes(case)),
    )


def _actions(case: Case, stage: int) -> tuple[Action, ...]:
    layout = case.layout
    return build_stage(
        layout.schedule,
        case.shape,
        stage,
        transfers=case.software.transfers,
        shared_head=layout.share_head,
        split_backward=layout.join_weight_gradients > 1,
    )


def _most_alive(actions: Sequence[Action], sizes: StageSizes, joined: int) -> tuple[float, float]:
    """(most bytes kept while `actions` run, the same with what each needs for a moment).

    A chunk's kept bytes are alive from its forward to its backward or the input's half of it, its
    deferred bytes from there until its weights' half has run, with `joined` of them at a time.
    """
    heads = {ActionKind.HEAD} if joined > 1 else set()  # else a head's run at once
    defers = {ActionKind.BACKWARD_WEIGHT} | heads
    left = Counter(action.chunk for action in actions if action.kind in defers)
    waiting: Counter[int] = Counter()
    alive = most = peak = 0.0
    for action in actions:
        chunk = action.chunk
        if action.kind is ActionKind.FORWARD:
            alive += sizes.kept[chunk]
            peak = max(peak, alive + sizes.forward_moment[chunk])
        if action.kind in INPUT_GRADIENTS:
            peak = max(peak, alive + sizes.backward_moment[chunk])
            alive -= sizes.kept[chunk]
        if action.kind is ActionKind.HEAD:
            peak = max(peak, alive + sizes.backward_moment[chunk])
        if action.kind is ActionKind.BACKWARD_INPUT or action.kind in heads:
            alive += sizes.deferred[chunk]
        most = max(most, alive)
        if action.kind in defers:
            waiting[chunk] += 1
            left[chunk] -= 1
            if waiting[chunk] == joined or left[chunk] == 0:
                alive -= waiting.pop(chunk) * sizes.deferred[chunk]
    return most, max(peak, most)


def deferred_bytes_per_token(model: ModelConfig, dtype_bytes: int, copies: int = 1) -> int:
    """Bytes that a deferred layer keeps for one token, before division by TP: inputs and outputs'
    gradients of its linears, whatever is recomputed.

    copies  tensor ranks that keep what they gather: 1 where each keeps its own rows, else all
    """
    hidden, ffn = model.hidden_size, model.ffn_size
    query, key = model.num_heads * model.dim_per_head, model.kv_heads * model.dim_per_head
    num_norms = 2 if model.block == "serial" else 1
    inputs = copies * num_norms * hidden + query + ffn
    gradients = query + 2 * key + (2 * ffn if model.gated else ffn) + copies * num_norms * hidden
    return dtype_bytes * (inputs + gradients)


def layer_bytes_per_token(
    model: ModelConfig, recompute: Recompute, dtype_bytes: int, seq_len: int
) -> int:
    """Bytes that one layer keeps for the backward pass of one token, before division by TP."""
    return sum(kept_per_token(model, recompute, dtype_bytes, seq_len))
