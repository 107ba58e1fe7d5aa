"""Seconds of a step from its pieces, by formula: a layout with floats, or many with arrays.

Let stage k need W_k for a micro-batch (forward, backward and what backward makes again, over all of
its v chunks). The busiest stage works m W_k. Before its first work a micro-batch passes the first
chunks of the stages in front of it, and their backward follows its last; in between it waits once
for the way through the last chunks of the stages behind it and back:

    step = max over k of ( m W_k + bubble of k ) + exposed transfers + ends

**Bubble.** Let `way` be f + b_input summed over one chunk of each other stage, `weight` the same of
b_weight, and `slack` twice the way past one stage:

| schedule | one chunk a stage | several |
|---|---|---|
| whole backwards (2104.04473: (p - 1) / (v m) of the work) | way + weight | the same |
| halves, weights' joined | way | way + max(0, weight - slack) |
| zero-bubble (2401.10241, ZB-H1) | way - weight | way - min(weight, slack) |
| zero-bubble, weights' of K joined | way - weight / K | way |

The first row follows from the order of actions; the others were found by simulation of the lists
(`simulate/`, p 2 to 16, v 1 to 6) and hold there within a chunk's time. Coupled transfers leave a
zero-bubble schedule nothing to fill (way), and where weights' halves are joined every round waits
for some stage's K at once.

**Transfers** x between stages. Decoupled, they run beside computation in the steady phase; while
the pipeline fills and drains there is nothing beside them on the way: v p - 1 of them each way.
With one chunk a stage no more than p micro-batches are in flight, which go there and back in
p W + 2 (p - 1) x: that is 2 (p - 1) / p x for each micro-batch, unless the stages of a pipeline
have time to spare. Coupled, a round sends and receives for a forward and a backward, each waited
for (MegaScale 3.2, Figure 4).

**Data parallelism.** Gathers begin when the first bucket is updated and go on beside the update,
the loading and the first forwards; reductions begin in the last backward of each chunk. A stage
holds v chunks that are p micro-batches apart at both ends of a step, so with equal chunks the
latest gather and reduction is that of the first chunk's first bucket, of the first chunk as a
whole, or of the last chunk (MegaScale 3.2: the first gather and the last reduction).

What is not here, and `simulate/` has: jitter of joined weight gradients, chunks of unequal size,
and links shared by transfers and collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Value = Any
"""A float, or an array with one entry a layout; all arrays of a call have equal length."""

_BUCKETS_UNDER_WAY = 2  # `parallel/gradients.py`

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
    ways_s         [K] or [K, layouts]: forward and input's half of one chunk of each other stage
    weights_s      the same of the weights' halves
    round_s        of a micro-batch on all stages and back, without weights' halves where cut
    forward_s      of one chunk of the first stage, `backward_s` with what is made again;
                   stage_*: of all its chunks
    whole          backwards in one; zero_bubble: halves that fill gaps; joined: K
    """

    pipeline: Value
    virtual: Value
    micro_batches: Value
    busy: Any
    ways_s: Any
    weights_s: Any
    round_s: Value
    forward_s: Value
    backward_s: Value
    stage_forward_s: Value
    stage_backward_s: Value
    whole: Value
    zero_bubble: Value
    joined: Value
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
    bubbles = _bubbles(pieces)
    each = busy.sum(axis=0)
    busiest = np.expand_dims(np.argmax(m * each + bubbles, axis=0), 0)
    spent = np.take_along_axis(busy, np.expand_dims(busiest, 0), axis=1)[:, 0]
    parts = {name: m * spent[i] for i, name in enumerate(SPENT_PARTS)}
    parts["bubble"] = np.take_along_axis(bubbles, busiest, axis=0)[0]
    parts["pipeline"] = _exposed_transfers(pieces, spent.sum(axis=0))
    parts["reduce"] = _exposed_reduce(pieces)
    parts["gather"] = _exposed_gather(pieces)
    for name in ("update", "embedding", "load", "fixed"):
        parts[name] = getattr(pieces, f"{name}_s") + 0.0 * each[0]
    return parts


def _bubbles(pieces: StepPieces) -> Any:
    """[K] or [K, layouts], by the table above."""
    way = np.asarray(pieces.ways_s, dtype=float)
    weight = np.asarray(pieces.weights_s, dtype=float)
    several, alone = np.greater(pieces.virtual, 1), np.equal(pieces.joined, 1)
    slack = 2 * way / np.maximum(1, np.asarray(pieces.pipeline) - 1)
    halves = way + np.where(several, np.maximum(0.0, weight - slack), 0.0)
    if pieces.coupled:
        filled = way
        chunk = weight / np.maximum(1, np.asarray(pieces.pipeline) - 1)
        halves += pieces.micro_batches * pieces.virtual * (pieces.joined - 1) * chunk
    else:
        interleaved = way - np.where(alone, np.minimum(weight, slack), 0.0)
        filled = np.where(several, interleaved, way - weight / pieces.joined)
    cut = np.where(pieces.zero_bubble, filled, halves)
    return np.maximum(0.0, np.where(pieces.whole, way + weight, cut))


def _exposed_transfers(pieces: StepPieces, busiest_s: Value) -> Value:
    """Between stages: on the way while the pipeline fills and drains; in the steady phase what is
    coupled, or what few micro-batches in flight cannot hide."""
    p, v, m, x = pieces.pipeline, pieces.virtual, pieces.micro_batches, pieces.transfer_s
    several = np.greater(v, 1)
    if pieces.coupled:
        rounds = np.where(np.greater(v * p, 2), 2 * m * v + 2 * p - 5, m + 1) * x
        return np.where(np.greater(p, 1), rounds, 0.0)
    there_and_back_s = pieces.round_s + 2 * (p - 1) * x
    one = np.maximum(0.0, there_and_back_s / p - busiest_s) * m
    ways = np.where(pieces.zero_bubble, v * p, 2 * (v * p - 1))
    ways_alone = np.where(pieces.zero_bubble, 4 * (p - 1), 2 * (p - 2))
    slot_s = (pieces.stage_forward_s + pieces.stage_backward_s) / v
    late = np.maximum(0.0, (p * slot_s + 2 * (p - 1) * x) / (2 * p - 1) - slot_s) * m * v
    exposed = np.where(several, ways * x + late, ways_alone * x + one)
    beside = 2 * m * v * np.minimum(x, slot_s) * (1.0 - 1.0 / pieces.transfer_slow_down)
    return np.where(np.greater(p, 1), exposed + beside, 0.0)


def _exposed_reduce(pieces: StepPieces) -> Value:
    """Of gradients, and what their reduction slows down."""
    d, m, zero = pieces.data, pieces.micro_batches, pieces.zero_stage
    often = np.greater_equal(zero, 2)
    rounds = np.ceil(m / pieces.joined)  # of weight gradients
    times = np.where(often, rounds, 1)
    if not pieces.overlap_reduce:
        return times * d.stage_reduce_s
    window = pieces.backward_s * (1.0 - 1.0 / d.buckets)
    late = pieces.pipeline * (pieces.stage_backward_s - pieces.backward_s)
    last_s = np.maximum(
        np.maximum(d.first_reduce_s, d.chunk_reduce_s - window), d.stage_reduce_s - window - late
    )
    spilled = np.where(often, _spilled_reduce(pieces), 0.0)
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
    late = pieces.pipeline * (pieces.stage_forward_s - pieces.forward_s)
    first_s = np.maximum(
        np.maximum(d.first_gather_s - before, d.chunk_gather_s - before - window),
        d.stage_gather_s - before - window - late,
    )
    first_s = np.maximum(0.0, np.where(always, d.first_gather_s, first_s))
    computing_s = pieces.stage_forward_s + pieces.stage_backward_s
    busy_s = 2 * d.stage_gather_s + d.stage_reduce_s  # ZeRO-3: all of it in every micro-batch
    spilled = np.where(always, m * np.maximum(0.0, busy_s - computing_s), 0.0)
    spilled = np.maximum(0.0, spilled - np.where(always, _spilled_reduce(pieces), 0.0))
    beside_s = np.where(always, times * d.stage_gather_s, d.stage_gather_s - before)
    hidden_s = np.maximum(0.0, beside_s - first_s - spilled)
    return first_s + spilled + hidden_s * (1.0 - 1.0 / d.slow_down)


def _spilled_reduce(pieces: StepPieces) -> Value:
    """Of reductions in every micro-batch (or every few that are joined): what computing does not
    hide. They begin in a backward, and as only two buckets may be under way while another fills,
    no more than two go on in the forward behind it; at the end, where the forwards of the warm-up
    are missing, backward follows backward."""
    p, v, m = pieces.pipeline, pieces.virtual, pieces.micro_batches
    reduce_s = pieces.data.stage_reduce_s * np.ceil(m / pieces.joined) / (m * v)
    forward_s, backward_s = pieces.stage_forward_s / v, pieces.stage_backward_s / v
    warm_up = np.minimum(np.where(np.greater(v, 1), 2 * (p - 1) + (v - 1) * p, p - 1), m * v - 1)
    left_s = np.minimum(forward_s, _BUCKETS_UNDER_WAY * reduce_s / pieces.data.buckets)
    steady = np.maximum(0.0, reduce_s - backward_s - left_s) * (m * v - 1 - warm_up)
    return steady + np.maximum(0.0, reduce_s - backward_s) * warm_up
