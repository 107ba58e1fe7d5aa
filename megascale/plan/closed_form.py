"""Seconds of a step from its pieces, by formula: a layout with floats, or many with arrays.

Let stage k need W_k for a micro-batch (forward, backward and what backward makes again, over all of
its v chunks), and let hop be what a micro-batch needs to get past one chunk and its gradient back.
The busiest stage works m W_k. Before its first work a micro-batch passes the first chunks of the
stages in front of it, and their backward follows its last; in between it waits once for the way
through the last chunks of the stages behind it and back:

    step = max over k of ( m W_k + sum of hops of the other stages ) + exposed transfers + ends

For equal stages that is m W (1 + (p - 1) / (v m)): the bubble of 2104.04473. What a hop is depends
on the schedule: f + b; f + b_input where halves are cut and a gradient leaves before the weights'
half; f + b_input - b_weight in zero-bubble schedules, which fill gaps with weights' halves
(2401.10241, ZB-H1).

Transfers x between stages. Decoupled, they run beside computation in the steady phase; while the
pipeline fills and drains there is nothing beside them on the way, and a micro-batch passes v p - 1
of them each way. Coupled, every compute waits for those around it (MegaScale 3.2, Figure 4).

Data parallelism. Gathers begin when the first bucket is updated and go on beside the update, the
loading and the first forwards; reductions begin in the last backward of each chunk. A stage holds v
chunks that are p micro-batches apart at both ends of a step, so with equal chunks the latest gather
and reduction is that of the first chunk's first bucket, of the first chunk as a whole, or of the
last chunk (MegaScale 3.2: the first gather and the last reduction).

What is not here, and `simulate/` has: jitter of joined weight gradients, and links shared by
transfers and collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Value = Any
"""A float, or an array with one entry a layout; all arrays of a call have equal length."""

SPENT_PARTS = ("gemm", "attention", "memory", "tensor", "launch")


@dataclass(frozen=True)
class DataPieces:
    """Data-parallel collectives of the first stage (which begins first and ends last), seconds.

    first_*  of the first bucket of its first chunk; chunk_*  of that chunk; stage_*  of all
    buckets  of that chunk
    """

    first_gather_s: Value
    chunk_gather_s: Value
    stage_gather_s: Value
    first_reduce_s: Value
    chunk_reduce_s: Value
    stage_reduce_s: Value
    buckets: Value
    slow_down: Value = 1.0


@dataclass(frozen=True)
class StepPieces:
    """What the formula needs.

    busy           [5, K] or [5, K, layouts]: seconds of a micro-batch on K stages, by SPENT_PARTS;
                   among them the busiest
    hops_s         [K] or [K, layouts]: hops of all stages but that one, a chunk each
    forward_s      of one chunk of the first stage, and `backward_s` with what is made again
    coupled        whether transfers are
    sharded_often  ZeRO-2 and 3 reduce in every micro-batch; 3 gathers twice in each
    """

    pipeline: Value
    virtual: Value
    micro_batches: Value
    busy: Any
    hops_s: Any
    forward_s: Value
    backward_s: Value
    transfer_s: Value
    transfer_slow_down: Value
    coupled: bool
    data: DataPieces
    zero_stage: Value
    overlap_reduce: bool
    overlap_gather: bool
    update_s: Value
    embedding_s: Value
    load_s: Value
    fixed_s: Value


def combine(pieces: StepPieces) -> dict[str, Any]:
    """Seconds by part; they add up to the step. Keys: SPENT_PARTS, then bubble, pipeline, reduce,
    gather, update, embedding, load, fixed."""
    m = pieces.micro_batches
    busy = np.asarray(pieces.busy, dtype=float)
    hops = np.asarray(pieces.hops_s, dtype=float)
    each = busy.sum(axis=0)
    busiest = np.expand_dims(np.argmax(m * each + hops, axis=0), 0)
    spent = np.take_along_axis(busy, np.expand_dims(busiest, 0), axis=1)[:, 0]
    parts = {name: m * spent[i] for i, name in enumerate(SPENT_PARTS)}
    parts["bubble"] = np.take_along_axis(hops, busiest, axis=0)[0]
    parts["pipeline"] = _exposed_transfers(pieces)
    parts["reduce"] = _exposed_reduce(pieces)
    parts["gather"] = _exposed_gather(pieces)
    parts["update"] = pieces.update_s + 0.0 * each[0]
    parts["embedding"] = pieces.embedding_s + 0.0 * each[0]
    parts["load"] = pieces.load_s + 0.0 * each[0]
    parts["fixed"] = pieces.fixed_s + 0.0 * each[0]
    return parts


def _exposed_transfers(pieces: StepPieces) -> Value:
    """Between stages: on the way while the pipeline fills and drains, and where they are coupled,
    around every compute."""
    p, v, m, x = pieces.pipeline, pieces.virtual, pieces.micro_batches, pieces.transfer_s
    chunks = v * p
    has_pipeline = np.greater(p, 1)
    ways = 2 * (chunks - 1) * x
    if pieces.coupled:
        # a round sends and receives for a forward and a backward; at a stage with two neighbours
        # both leave by one link
        rounds = np.where(np.greater(chunks, 2), 2, 1) * m * v * x
        return np.where(has_pipeline, rounds + ways, 0.0)
    sigma = pieces.transfer_slow_down
    computing_s = pieces.forward_s + pieces.backward_s
    hidden_s = np.minimum(2 * x, computing_s)
    steady = m * v * (np.maximum(0.0, 2 * x - computing_s) + hidden_s * (1.0 - 1.0 / sigma))
    return np.where(has_pipeline, ways + steady, 0.0)


def _exposed_reduce(pieces: StepPieces) -> Value:
    """Of gradients, and what their reduction slows down."""
    d, m, zero = pieces.data, pieces.micro_batches, pieces.zero_stage
    often = np.greater_equal(zero, 2)
    times = np.where(often, m, 1)
    if not pieces.overlap_reduce:
        return times * d.stage_reduce_s
    window = pieces.backward_s * (1.0 - 1.0 / d.buckets)
    late = (pieces.virtual - 1) * pieces.pipeline * pieces.backward_s
    last_s = np.maximum(
        np.maximum(d.first_reduce_s, d.chunk_reduce_s - window), d.stage_reduce_s - window - late
    )
    computing_s = pieces.virtual * (pieces.forward_s + pieces.backward_s)
    spilled = np.where(often, (m - 1) * np.maximum(0.0, d.stage_reduce_s - computing_s), 0.0)
    hidden_s = np.maximum(0.0, times * d.stage_reduce_s - last_s - spilled)
    return last_s + spilled + hidden_s * (1.0 - 1.0 / d.slow_down)


def _exposed_gather(pieces: StepPieces) -> Value:
    """Of parameters, and what that slows down."""
    d, m = pieces.data, pieces.micro_batches
    always = np.equal(pieces.zero_stage, 3)
    times = np.where(always, 2 * m, 1)
    if not pieces.overlap_gather:
        return times * d.stage_gather_s
    share = d.first_gather_s / np.maximum(d.stage_gather_s, 1e-30)
    before = (pieces.update_s + pieces.load_s) * (1.0 - share)  # the rest of the update hides
    window = pieces.forward_s * (1.0 - 1.0 / d.buckets)
    late = (pieces.virtual - 1) * pieces.pipeline * pieces.forward_s
    first_s = np.maximum(
        np.maximum(d.first_gather_s - before, d.chunk_gather_s - before - window),
        d.stage_gather_s - before - window - late,
    )
    first_s = np.maximum(0.0, np.where(always, d.first_gather_s, first_s))
    computing_s = pieces.virtual * (pieces.forward_s + pieces.backward_s)
    busy_s = 2 * d.stage_gather_s + d.stage_reduce_s  # ZeRO-3: all of it in every micro-batch
    spilled = np.where(always, m * np.maximum(0.0, busy_s - computing_s), 0.0)
    spilled = np.maximum(0.0, spilled - np.where(always, _spilled_reduce(pieces), 0.0))
    beside_s = np.where(always, times * d.stage_gather_s, d.stage_gather_s - before)
    hidden_s = np.maximum(0.0, beside_s - first_s - spilled)
    return first_s + spilled + hidden_s * (1.0 - 1.0 / d.slow_down)


def _spilled_reduce(pieces: StepPieces) -> Value:
    computing_s = pieces.virtual * (pieces.forward_s + pieces.backward_s)
    return (pieces.micro_batches - 1) * np.maximum(0.0, pieces.data.stage_reduce_s - computing_s)
