"""From a case and a cluster to the seconds of every piece of a step: `price`.

Sizes come from `work/`, seconds from the cluster, and what of a transfer is hidden behind a product
from `overlap.py`. Effects of scale multiply: computing time by `compute_factor`, bandwidths between
nodes by `network_share`. Layers are alike, so that one is priced and counted; prices of layers are
remembered by `RankShape`, placement and software, and a search of ten thousand layouts makes a few
hundred of them.
"""

from __future__ import annotations

from megascale.plan.bucket_prices import data_prices, stage_names
from megascale.plan.buckets import stage_buckets
from megascale.plan.case import Case
from megascale.plan.effects.effects import NO_EFFECTS, Effects
from megascale.plan.machine.cluster import Cluster
from megascale.plan.overlap import Pricer
from megascale.plan.prices import ChunkPrices, Spent, StepPrices
from megascale.plan.stage_memory import stage_elements
from megascale.plan.stages import split_layers
from megascale.plan.work.ends import (
    embedding_work,
    final_norm_work,
    head_work,
    shared_head_work,
    vocabulary_rows,
)
from megascale.plan.work.layer import LayerWork, layer_work_of
from megascale.plan.work.operations import Collective, MemoryPass, Transfer
from megascale.plan.work.shape import RankShape, rank_shape
from megascale.plan.work.update import update_work

_TOKEN_BYTES = 8  # int64, as tokens reach the device


def price(case: Case, cluster: Cluster, effects: Effects = NO_EFFECTS) -> StepPrices:
    """Seconds of the pieces of a step of `case` on `cluster`."""
    pricer = pricer_of(case, cluster, effects)
    layout = case.layout
    shape = rank_shape(case)
    layer = layer_prices(pricer, shape)
    embedding, last, head = end_prices(pricer, case)
    chunks = []
    layers = split_layers(case.job.model.num_layers, layout.num_chunks)
    for chunk, held in enumerate(layers):
        parts = [times(layer, len(held))]
        if chunk == 0:
            parts.append(embedding)
        if chunk == layout.num_chunks - 1:
            parts.append(last)
        chunks.append(plus(parts))
    transfer_s = transfer_seconds(pricer, case)
    return StepPrices(
        chunks=tuple(chunks),
        head=head,
        transfer_s=tuple([transfer_s] * layout.num_chunks),
        transfer_slow_down=cluster.slow_down(cluster.link_of(pricer.group("pipeline"))),
        data=tuple(data_prices(case, pricer, stage) for stage in range(layout.pipeline)),
        update_s=tuple(update_seconds(pricer, case, stage) for stage in range(layout.pipeline)),
        load_s=load_seconds(pricer, case),
        fixed_s=effects.fixed_s + effects.launch_skew_s,
        embedding_s=embedding_seconds(pricer, case),
    )


def pricer_of(case: Case, cluster: Cluster, effects: Effects = NO_EFFECTS) -> Pricer:
    software = case.software
    return Pricer(
        cluster, case.layout.mesh, software.tensor_overlap, effects, software.copy_engines
    )


def layer_prices(pricer: Pricer, shape: RankShape) -> ChunkPrices:
    """Of one layer."""
    return work_prices(pricer, layer_work_of(shape), shape)


def work_prices(pricer: Pricer, work: LayerWork, shape: RankShape) -> ChunkPrices:
    """Of a layer or an end. In a whole backward, transfers of the inputs' half hide behind the
    weights' products too."""
    forward, recompute = pricer.spent(work.forward), pricer.spent(work.recompute)
    halves = (work.backward_input, work.backward_weight)
    if shape.halves == "whole":
        inputs, weights = pricer.spent_of_parts(halves)
    else:
        inputs, weights = (pricer.spent(half, shape.joined) for half in halves)
    return ChunkPrices(forward, recompute, inputs, weights)


def end_prices(pricer: Pricer, case: Case) -> tuple[ChunkPrices, ChunkPrices, ChunkPrices | None]:
    """What the first chunk has besides its layers, what the last has, and a shared head."""
    shape = rank_shape(case)
    embedding = work_prices(pricer, embedding_work(case), shape)
    if not case.layout.share_head:
        return embedding, work_prices(pricer, head_work(case), shape), None
    norm = work_prices(pricer, final_norm_work(case), shape)
    return embedding, norm, work_prices(pricer, shared_head_work(case), shape)


def times(prices: ChunkPrices, count: float) -> ChunkPrices:
    """Of `count` like it."""
    return ChunkPrices(
        prices.forward.times(count),
        prices.recompute.times(count),
        prices.backward_input.times(count),
        prices.backward_weight.times(count),
    )


def plus(parts: list[ChunkPrices]) -> ChunkPrices:
    """One after the other."""
    forward = recompute = inputs = weights = Spent()
    for part in parts:
        forward += part.forward
        recompute += part.recompute
        inputs += part.backward_input
        weights += part.backward_weight
    return ChunkPrices(forward, recompute, inputs, weights)


def transfer_seconds(pricer: Pricer, case: Case) -> float:
    """Hidden states to the next stage: the own rows, or where rows are whole, an equal part of them
    from each tensor rank, gathered on the other side as Megatron-LM does. Where the host waits for
    each exchange, the device has nothing to do until it has launched again."""
    if pricer.mesh.pipeline == 1:
        return 0.0
    shape = rank_shape(case)
    own = shape.hidden_bytes / shape.tensor
    seconds = pricer.transfer_s(Collective("send", Transfer.SEND, own, "pipeline"))
    if case.software.synchronises:
        # an exchange is of two transfers where a stage holds several chunks, else of one
        per_exchange = 2 if case.layout.virtual > 1 else 1
        seconds += pricer.cluster.device.restart_s / per_exchange
    if shape.sequence_parallel or shape.tensor == 1:
        return seconds
    gather = Collective("send.gather", Transfer.ALL_GATHER, shape.hidden_bytes, "tensor")
    return seconds + pricer.transfer_s(gather)


def update_seconds(pricer: Pricer, case: Case, stage: int) -> float:
    """The optimizer on a stage's shard."""
    buckets = stage_buckets(case, stage)
    work = update_work(
        case,
        stage_elements(case, stage),
        sum(len(chunk) for chunk in buckets.values()),
        stage_names(case, stage),
    )
    return pricer.spent(work).total_s


def embedding_seconds(pricer: Pricer, case: Case) -> float:
    """Tied embeddings: both stages' gradients are summed, each data rank its shard."""
    model, layout = case.job.model, case.layout
    if not model.tie_embeddings or layout.pipeline == 1:
        return 0.0
    sharded = layout.data if layout.zero_stage > 0 else 1
    elements = vocabulary_rows(model.vocab, layout.tensor) * model.hidden_size / sharded
    tied = Collective("tied", Transfer.ALL_REDUCE, 4 * elements, "embedding")
    return pricer.transfer_s(tied)


def load_seconds(pricer: Pricer, case: Case) -> float:
    """Where the host does not run ahead, the device has nothing to do from the end of a step until
    the host has seen it, copied the next tokens and labels, and launched."""
    if case.software.host_ahead:
        return 0.0
    tokens = case.micro_batches * case.micro_batch_tokens
    copied = MemoryPass("copy", 2 * _TOKEN_BYTES * tokens, kernels=2 * case.micro_batches)
    return pricer.spent((copied,)).total_s + pricer.cluster.device.restart_s
