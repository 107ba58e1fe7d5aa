"""Peak memory of many layouts at once, by stage: what the search filters with.

    step_memory(job, software, columns) -> [2, layouts]: bytes on the first and on the last stage

One of the two is the fullest: no stage keeps more micro-batches than the first, which also has the
embedding, and the last one has head and logits. Sizes are those of `stage_memory.py`, as in
`memory.py`; the walk over the actions is replaced by what it finds, with p stages, v chunks on
each, m micro-batches, on stage s:

* in flight at most n chunks: min(p - s, m), interleaved min(2 (p - 1 - s) + (v - 1) p + 1, m v),
  of which those with a layer more than others are counted in the worst place of a period;
* deferred by a zero-bubble schedule: s chunks, and the one whose input's half has just ended;
* deferred until K are joined: K - 1 of the chunk in turn, and what p leaves over in the others.

A half chunk's difference is left: `tests/plan/test_step_memory.py` holds both within 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megascale.plan.buckets import stage_buckets
from megascale.plan.case import Case, Job, Recompute, Software
from megascale.plan.columns import (
    CUT,
    END,
    LAYER,
    RECOMPUTES,
    SCHEDULE_NAMES,
    Floats,
    LayoutColumns,
    Table,
)
from megascale.plan.schedules import SCHEDULES
from megascale.plan.schedules.transfers import PREFETCH_COMPUTES, SEND_WINDOW
from megascale.plan.stage_memory import (
    EVENTS_A_PASS,
    LAUNCH_QUEUE,
    EndSizes,
    end_sizes,
    layer_kernels,
    library_bytes,
    main_gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    reduction_bytes,
    stage_elements,
    symmetric_bytes,
)
from megascale.plan.work.kept import (
    backward_moment_bytes,
    deferred_bytes,
    forward_moment_bytes,
    kept_bytes,
)
from megascale.plan.work.shape import rank_shape


def step_memory(
    job: Job,
    software: Software,
    columns: LayoutColumns,
    *,
    recomputes: Sequence[Recompute] = RECOMPUTES,
    schedules: Sequence[str] = SCHEDULE_NAMES,
) -> Floats:
    """[2, layouts]: bytes of a rank of the first and of the last stage at the worst moment."""
    table = Table(job, software, columns, recomputes, schedules)
    if len(table.tensor) == 0:
        return np.zeros((2, 0))
    layer = _LayerColumns(*table.by(LAYER, _layer_row))
    ends = EndSizes(*table.by(END, _end_row))
    state = table.by(CUT, _state_row)
    stages = [_Stage(table, stage, layer, ends) for stage in (0, table.pipeline - 1)]
    found = [state[i] + stage.peak() + stage.transfers() for i, stage in enumerate(stages)]
    return np.asarray(np.stack(found) + library_bytes() + layer.symmetric)


@dataclass(frozen=True)
class _LayerColumns:
    kept: Floats
    deferred: Floats
    forward: Floats
    backward: Floats
    kernels: Floats
    own: Floats
    hidden: Floats
    symmetric: Floats
    splits: Floats


def _layer_row(case: Case) -> list[float]:
    shape = rank_shape(case)
    return [
        kept_bytes(shape),
        deferred_bytes(shape),
        forward_moment_bytes(shape),
        backward_moment_bytes(shape),
        layer_kernels(shape),
        shape.own_hidden_bytes,
        shape.hidden_bytes,
        symmetric_bytes(case),
        SCHEDULES[case.layout.schedule].splits_backward,
    ]


def _end_row(case: Case) -> list[float]:
    stages = case.layout.pipeline if case.layout.share_head else 1
    ends = end_sizes(rank_shape(case), stages)
    return [getattr(ends, field.name) for field in fields(EndSizes)]


def _state_row(case: Case) -> list[float]:
    """Parameters, gradients, optimizer: of the first stage and of the last."""
    limit = case.software.bucket_mb * 1e6 / max(4, case.job.dtype_bytes)
    found = []
    for stage in (0, case.layout.pipeline - 1):
        elements = stage_elements(case, stage)
        largest = max(b.elements for held in stage_buckets(case, stage).values() for b in held)
        bucket = min(elements, max(largest, limit))
        found.append(
            parameter_bytes(case, elements, bucket)
            + main_gradient_bytes(case, elements, bucket)
            + reduction_bytes(case, bucket)
            + optimizer_bytes(case, elements)
        )
    return found


class _Stage:
    """The first or the last stage of every layout. A period is p micro-batches through v chunks."""

    def __init__(self, table: Table, stage: Any, layer: _LayerColumns, ends: EndSizes) -> None:
        self.table, self.layer, self.ends = table, layer, ends
        self.p, self.v, self.m = table.pipeline, table.virtual, table.micro_batches
        self.period, self.total = self.p * self.v, self.m * self.v
        self.shares = table.share_head.astype(bool)
        self.is_first, self.is_last = stage == 0, stage == self.p - 1
        self.own_head = self.is_last & ~self.shares
        self.base, larger = np.divmod(table.job.model.num_layers, self.period)
        self.wide = np.clip(-((stage - larger) // self.p), 0, self.v)  # chunks with a layer more
        warm_up = np.where(self.v > 1, 2 * (self.p - 1 - stage) + (self.v - 1) * self.p, 0)
        warm_up = np.where(self.v > 1, warm_up, self.p - 1 - stage)
        self.in_flight = np.minimum(warm_up + 1, self.total)
        joined = table.join_weight_gradients
        self.split = layer.splits.astype(bool) | (joined > 1)
        self.delay = np.where(layer.splits.astype(bool), stage, 0)
        self.in_turn = joined - 1

    def peak(self) -> Floats:
        """Kept, deferred, and for a moment; and the logits' place in pieces."""
        most = np.zeros(len(self.p))
        for done in self._candidates():
            most = np.maximum(most, self._alive(done))
        return np.asarray(most + np.where(self.own_head | self.shares, self.ends.logits, 0.0))

    def _candidates(self) -> list[Any]:
        """Backwards behind which what is alive may be at its most: it grows and falls with the
        chunks that come and go, so only their edges count, each in the last two periods."""
        n, first_wide = self.in_flight, self.p * (self.v - self.wide)
        window = self.delay + self.in_turn
        edges = [0 * n, self.p * self.wide - n, self.total - n, self.total - n + window]
        for edge in (0 * n, self.p + 0 * n, self.p * (self.v - 1), first_wide):
            edges += [edge - 1, edge + window, edge + window - 1]
        found = [0 * n]
        for edge in edges:
            last = edge + (self.total - 1 - edge) // self.period * self.period
            found += [last, np.maximum(last - self.period, np.minimum(last, 0))]
        return [np.clip(done, 0, self.total - 1) for done in found]

    def _alive(self, done: Any) -> Floats:
        """Bytes between the backward number `done`, counted from 0, and the one before it; and
        behind its input's half."""
        layer, ends = self.layer, self.ends
        forwards = np.minimum(done + self.in_flight, self.total)
        wide = self._forwards_of_wide(forwards) - self._backwards_of_wide(done)
        kept = ((forwards - done) * self.base + wide) * layer.kept + self.is_last * ends.norm
        window = np.minimum(self.delay + self.in_turn, done)
        deferred = self._deferred(done) - self._deferred(done - window)
        deferred += self._left_over(done - window)
        moment = np.maximum(
            np.maximum(layer.forward, layer.backward - self.own_head * ends.norm),
            np.where(self.own_head | self.shares, np.maximum(ends.forward, ends.backward), 0.0),
        )
        before = kept + np.where(self.split, deferred, 0.0)
        is_wide = self._backwards_of_wide(done + 1) - self._backwards_of_wide(done)
        chunk = (self.base + is_wide) * layer.kept
        after = before - chunk + self._deferred(done + 1) - self._deferred(done)
        return np.asarray(np.maximum(before + moment, np.where(self.split, after, 0.0)))

    def _forwards_of_wide(self, count: Any) -> Any:
        """How many of the first `count` forwards are of wide chunks, which come first."""
        here = np.minimum(count % self.period, self.p * self.wide)
        return count // self.period * self.p * self.wide + here

    def _backwards_of_wide(self, count: Any) -> Any:
        here = np.maximum(0, count % self.period - self.p * (self.v - self.wide))
        return count // self.period * self.p * self.wide + here

    def _deferred(self, count: Any) -> Floats:
        """Bytes that the first `count` backwards deferred."""
        position, periods = count % self.period, count // self.period
        heads = periods * self.p + np.minimum(position, self.p)
        tables = periods * self.p + np.maximum(0, position - self.p * (self.v - 1))
        layers = count * self.base + self._backwards_of_wide(count)
        return np.asarray(
            layers * self.layer.deferred
            + self.own_head * heads * self.ends.deferred
            + self.is_first * tables * self.layer.hidden
        )

    def _left_over(self, done: Any) -> Floats:
        """Of other chunks than the one in turn, where p is no multiple of the micro-batches that
        join; and of a shared head."""
        joined = self.table.join_weight_gradients
        mean = self._deferred(self.period) / self.period
        shared = np.gcd(joined, self.p)
        left = np.where((self.v > 1) & (shared < joined), joined - shared, 0) * (self.v - 1)
        heads = np.where(self.shares, (joined - 1) * self.ends.deferred, 0.0)
        return np.asarray(np.minimum(left, done) * mean + heads)

    def transfers(self) -> Floats:
        """As `stage_memory.transfer_bytes`."""
        p, v = self.p, self.v
        sent = np.full(len(p), 2.0 * SEND_WINDOW)
        if self.table.software.transfers == "decoupled":
            layers = self.table.job.model.num_layers / self.period
            entries = layers * self.layer.kernels / 2 + EVENTS_A_PASS
            ahead = np.minimum(2 * self.total, LAUNCH_QUEUE / entries)
            sent = np.maximum(sent, ahead * (3 * v - 1 - self.is_last) / (2 * v))
        return np.where(p > 1, (1 + PREFETCH_COMPUTES + sent) * self.layer.own, 0.0)
