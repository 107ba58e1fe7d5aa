"""Predicted memory of a rank, from configuration and mesh alone.

Persistent state follows ZeRO (1910.02054) as `parallel/zero.py` stores it, activations Korthikanti
et al. (2205.05198, section 4) with flash attention (no scores, one fp32 log-sum-exp a query) and
counter-based dropout (no masks). With sequence parallelism every stored activation is divided by
the tensor-parallel size: gathered inputs are gathered again for the backward pass.
Activations in flight are not a formula: the very actions of the stage are walked. Where backward
is cut in halves, or weight gradients of several micro-batches are joined, the operands of the
weights' half stay until it runs: each linear's input and its output's gradient.

Not counted: the allocator's reserve, communicators' buffers, temporaries within an operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from megascale.config import ModelConfig, RunConfig
from megascale.plan.actions import INPUT_GRADIENTS, Action, ActionKind, PipelineShape
from megascale.plan.parameters import LogicalParameter, chunk_parameters
from megascale.plan.schedules import build_stage
from megascale.plan.schedules.transfers import PREFETCH_COMPUTES, SEND_WINDOW
from megascale.plan.stages import split_layers
from megascale.shards import Placement
from megascale.topology import Mesh

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_BUCKETS_IN_FLIGHT = 2  # ZeRO-2: one that backward fills and one being reduced


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; all ranks of a stage are alike."""

    parameter_bytes: int
    main_gradient_bytes: int
    reduction_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    logits_bytes: int
    transfer_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


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
    training, model = config.training, config.model
    local = sum(p.local_elements(mesh.tensor) for c in stage_chunks(config, stage) for p in c)
    dtype_bytes = _DTYPE_BYTES[training.dtype]
    tokens = training.micro_batch_size * training.seq_len
    hidden_bytes = dtype_bytes * tokens * model.hidden_size // mesh.tensor
    logits = 0
    if config.parallelism.share_head:
        logits = dtype_bytes * tokens * -(-model.vocab // (mesh.tensor * mesh.pipeline))
    elif stage == mesh.pipeline - 1:
        logits = dtype_bytes * tokens * -(-model.vocab // mesh.tensor)
    transfer_buffers = 1 + PREFETCH_COMPUTES + 2 * SEND_WINDOW  # activations and gradients out
    return RankMemory(
        parameter_bytes=dtype_bytes * local,
        main_gradient_bytes=_main_gradient_bytes(config, mesh, stage, local),
        reduction_bytes=_reduction_bytes(config, mesh, stage, local),
        optimizer_bytes=_optimizer_bytes(training.dtype, local, mesh.data),
        activation_bytes=_activation_bytes(config, mesh, stage),
        logits_bytes=logits,
        transfer_bytes=transfer_buffers * hidden_bytes if mesh.pipeline > 1 else 0,
    )


def _main_gradient_bytes(config: RunConfig, mesh: Mesh, stage: int, local: int) -> int:
    """fp32 (fp64 for fp64): whole, or under ZeRO-2 a shard and the buckets in flight."""
    main_bytes = max(4, _DTYPE_BYTES[config.training.dtype])
    if config.parallelism.zero_stage == 1 or mesh.data == 1:
        return main_bytes * local
    bucket = min(local, _bucket_elements(config, mesh, stage))
    return main_bytes * (-(-local // mesh.data) + min(local, _BUCKETS_IN_FLIGHT * bucket))


def _reduction_bytes(config: RunConfig, mesh: Mesh, stage: int, local: int) -> int:
    """Gradients that travel in bf16 (`parallel/reduce_scatter.py`): a copy of a bucket that is sent
    and one that is received; on CUDA one bucket's at a time, in the order of a stream. In the main
    dtype they travel in place."""
    if config.parallelism.grad_reduce_dtype != "bfloat16" or mesh.data == 1:
        return 0
    sent = _DTYPE_BYTES["bfloat16"] * min(local, _bucket_elements(config, mesh, stage))
    return 2 * sent


def _bucket_elements(config: RunConfig, mesh: Mesh, stage: int) -> int:
    """Parameters of the largest bucket: `bucket_mb` of main gradients, never less than the largest
    unit of the stage (a layer, the embedding, the head)."""
    limit = config.parallelism.bucket_mb * 1e6 / max(4, _DTYPE_BYTES[config.training.dtype])
    units: dict[str, int] = {}
    for chunk in stage_chunks(config, stage):
        for parameter in chunk:
            first, second, *_ = parameter.name.split(".")
            unit = f"layers.{second}" if first == "layers" else first
            units[unit] = units.get(unit, 0) + parameter.local_elements(mesh.tensor)
    return max(int(limit), *units.values())


def _optimizer_bytes(dtype: str, local: int, data: int) -> int:
    """Two moments, and a master copy where the parameters are not themselves the master."""
    main_bytes = max(4, _DTYPE_BYTES[dtype])
    copies = 3 if dtype == "bfloat16" else 2
    return copies * main_bytes * -(-local // data)


def _activation_bytes(config: RunConfig, mesh: Mesh, stage: int) -> int:
    """The most that is alive at once while the actions of `stage` run in order."""
    par, model, mode = config.parallelism, config.model, config.activation_checkpoint.mode
    dtype_bytes = _DTYPE_BYTES[config.training.dtype]
    seq_len = config.training.seq_len
    tokens = config.training.micro_batch_size * seq_len
    per_layer = layer_bytes_per_token(model, mode, dtype_bytes, seq_len)
    layers = split_layers(model.num_layers, par.num_chunks)
    bytes_of = {
        chunk: len(layers[chunk]) * per_layer
        + (2 * dtype_bytes * model.hidden_size if chunk == par.num_chunks - 1 else 0)  # final norm
        for chunk in range(stage, par.num_chunks, par.pipeline_parallel_size)
    }
    count = config.micro_batches(config.training.global_batch_size, mesh.data)
    shape = PipelineShape(par.pipeline_parallel_size, par.virtual_pipeline_size, count)
    copies = mesh.tensor if par.join_weight_gradients > 1 else 1  # joined ones are kept gathered
    head = dtype_bytes * (copies * model.hidden_size + model.vocab)  # input, gradient of logits
    deferred_of = {
        chunk: len(layers[chunk]) * deferred_bytes_per_token(model, dtype_bytes, copies)
        + (head if chunk == par.num_chunks - 1 and not par.share_head else 0)
        for chunk in bytes_of
    }
    deferred_of[shape.head_chunk] = head // par.pipeline_parallel_size
    actions = build_stage(
        par.schedule,
        shape,
        stage,
        transfers=par.pipeline_transfers,
        shared_head=par.share_head,
        split_backward=par.join_weight_gradients > 1,
    )
    most = _most_alive(actions, bytes_of, deferred_of, par.join_weight_gradients)
    if mode == "full":  # the layer that is being recomputed
        most += layer_bytes_per_token(model, "none", dtype_bytes, seq_len)
    return most * tokens // mesh.tensor


def _most_alive(
    actions: Sequence[Action], kept: Mapping[int, int], deferred: Mapping[int, int], joined: int
) -> int:
    """The most bytes alive while `actions` run.

    kept      by chunk: from its forward to its backward or the input's half of it
    deferred  by chunk: from there until its weights' half has run, with `joined` of them at a time
    """
    heads = {ActionKind.HEAD} if joined > 1 else set()  # else a head's run at once
    defers = {ActionKind.BACKWARD_WEIGHT} | heads
    left = Counter(action.chunk for action in actions if action.kind in defers)
    waiting: Counter[int] = Counter()
    alive = most = 0
    for action in actions:
        chunk = action.chunk
        if action.kind is ActionKind.FORWARD:
            alive += kept[chunk]
        if action.kind in INPUT_GRADIENTS:
            alive -= kept[chunk]
        if action.kind is ActionKind.BACKWARD_INPUT or action.kind in heads:
            alive += deferred[chunk]
        most = max(most, alive)
        if action.kind in defers:
            waiting[chunk] += 1
            left[chunk] -= 1
            if waiting[chunk] == joined or left[chunk] == 0:
                alive -= waiting.pop(chunk) * deferred[chunk]
    return most


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
    model: ModelConfig, recompute: str, dtype_bytes: int, seq_len: int
) -> int:
    """Bytes that one layer keeps for the backward pass of one token, before division by TP.

    Selective recomputation makes the activation's output again, and the attention probabilities
    where they exist: with attention dropout, which flash kernels cannot do in every layout alike.
    """
    hidden, ffn = model.hidden_size, model.ffn_size
    if recompute == "full":
        return dtype_bytes * hidden
    query, key = model.num_heads * model.dim_per_head, model.kv_heads * model.dim_per_head
    num_norms = 2 if model.block == "serial" else 1
    statistics = (2 if model.norm == "layernorm" else 1) * 4
    elements = num_norms * 2 * hidden  # each norm's input and its output, the linears' input
    elements += query + 2 * key  # q, k, v as attention reads them
    elements += query + key if model.qk_norm else 0  # q and k before their norms
    elements += query  # attention's output, the input of o
    elements += 2 * ffn if model.gated else ffn  # the activation's input
    scores = 4 * model.num_heads  # flash attention's log-sum-exp
    if recompute == "none":
        elements += ffn  # the activation's output, the input of fc2
        if model.attention_dropout > 0:  # fp32 probabilities, and dropped ones
            scores = (4 + dtype_bytes) * model.num_heads * seq_len
    return dtype_bytes * elements + num_norms * statistics + scores
