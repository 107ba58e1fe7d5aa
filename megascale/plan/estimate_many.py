"""The closed form for many layouts of one job at once: what the search calls.

    estimate_many(job, software, columns, cluster) -> Estimates

`columns` has arrays of equal length, one entry a layout (`search.Space` is one such). A layer is
priced once for each (tensor, micro-batch, recompute, halves) among them, collectives once for each
way of cutting the model, and everything else is arithmetic on arrays: the formula is that of
`estimate`, from the same pieces, so both give the same seconds (`tests/plan/test_estimate.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megascale.plan.bucket_prices import data_prices
from megascale.plan.case import Case, Job, Recompute, Software
from megascale.plan.closed_form import DataPieces, StepPieces, combine
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
from megascale.plan.effects.effects import NO_EFFECTS, Effects
from megascale.plan.estimate import data_pieces, way_s, weight_s
from megascale.plan.machine.cluster import Cluster
from megascale.plan.prices import ChunkPrices, Spent
from megascale.plan.pricing import (
    embedding_seconds,
    end_prices,
    layer_prices,
    load_seconds,
    pricer_of,
    transfer_seconds,
    update_seconds,
)
from megascale.plan.schedules import SCHEDULES
from megascale.plan.work.shape import rank_shape

_SPENT = tuple(field.name for field in fields(Spent))


@dataclass(frozen=True)
class Estimates:
    """step_s [layouts]; `parts` add up to it, with the keys of `closed_form.combine`."""

    step_s: Floats
    parts: dict[str, Floats]


def estimate_many(
    job: Job,
    software: Software,
    columns: LayoutColumns,
    cluster: Cluster,
    effects: Effects = NO_EFFECTS,
    *,
    recomputes: Sequence[Recompute] = RECOMPUTES,
    schedules: Sequence[str] = SCHEDULE_NAMES,
) -> Estimates:
    """The step's seconds of every layout. Their global batch is the job's."""
    table = Table(job, software, columns, recomputes, schedules)
    if len(table.tensor) == 0:
        return Estimates(np.zeros(0), {})
    parts = combine(_pieces(table, cluster, effects))
    return Estimates(np.sum(list(parts.values()), axis=0), parts)


def _pieces(table: Table, cluster: Cluster, effects: Effects) -> StepPieces:
    split = _Split(table, cluster, effects)
    first = split.layers_of(0), split.base + (split.larger > 0)  # of the stage, of its first chunk
    updates = table.by(CUT, lambda case: _update_row(case, cluster, effects))
    return StepPieces(
        pipeline=table.pipeline,
        virtual=table.virtual,
        micro_batches=table.micro_batches,
        busy=np.stack([split.busy(stage) for stage in split.stages], axis=1),
        ways_s=split.of_others("way"),
        weights_s=split.of_others("weight"),
        round_s=split.of_all("way") + np.where(split.whole, split.of_all("weight"), 0.0),
        forward_s=split.of_first("forward", first[1]),
        backward_s=split.of_first("backward", first[1]),
        stage_forward_s=split.of_first("forward", first[0]),
        stage_backward_s=split.of_first("backward", first[0]),
        whole=split.whole,
        zero_bubble=split.zero_bubble,
        joined=table.join_weight_gradients,
        transfer_s=table.by(_PLACED, lambda case: _transfer(case, cluster, effects)),
        transfer_slow_down=table.by(_PLACED, lambda case: _slow_down(case, cluster)),
        coupled=table.software.transfers == "coupled",
        data=_data(table, cluster, effects),
        zero_stage=table.zero_stage,
        overlap_reduce=table.software.overlap_grad_reduce,
        overlap_gather=table.software.overlap_param_gather,
        update_s=updates[0],
        embedding_s=updates[1],
        load_s=table.by(
            ("data", "micro_batch_size"),
            lambda case: load_seconds(pricer_of(case, cluster, effects), case),
        ),
        fixed_s=effects.fixed_s + effects.launch_skew_s,
    )


_PLACED = ("tensor", "pipeline", "data", "micro_batch_size")
_TIMES = ("forward", "backward", "way", "weight", "zero_bubble")


class _Rows:
    """What `_row` gives, of all layouts: `spent` [5, layouts] and _TIMES [layouts]."""

    spent: Floats
    zero_bubble: Floats

    def __init__(self, rows: Floats) -> None:
        self.spent = rows[: len(_SPENT)]
        for name, row in zip(_TIMES, rows[len(_SPENT) :], strict=True):
            setattr(self, name, row)


class _Split:
    """How layers and ends lie on the stages of every layout (`stages.split_layers`), and what they
    take there.

    stages  the first, the last, and of those with a layer more the last, which has most in front:
            one of them is the busiest
    """

    def __init__(self, table: Table, cluster: Cluster, effects: Effects) -> None:
        self.p, self.v = table.pipeline, table.virtual
        self.num_layers = table.job.model.num_layers
        self.layer = _Rows(table.by(LAYER, lambda case: _layer_row(case, cluster, effects)))
        ends = table.by(END, lambda case: _end_rows(case, cluster, effects))
        self.embedding, self.last, self.head = (_Rows(rows) for rows in ends)
        self.base, self.larger = np.divmod(self.num_layers, self.p * self.v)
        wide = np.where(self.larger > 0, (self.larger - 1) % self.p, 0)
        self.stages = (0 * self.p, wide, self.p - 1)
        self.zero_bubble = self.layer.zero_bubble.astype(bool)
        self.whole = ~self.zero_bubble & (table.join_weight_gradients == 1)

    def layers_of(self, stage: Any) -> Any:
        return self.v * self.base + np.clip(-((stage - self.larger) // self.p), 0, self.v)

    def busy(self, stage: Any) -> Floats:
        """[5, layouts]: of a micro-batch on a stage."""
        of_ends = (stage == 0) * self.embedding.spent + (stage == self.p - 1) * self.last.spent
        return np.asarray(self.layers_of(stage) * self.layer.spent + of_ends + self.head.spent)

    def of_all(self, name: str) -> Floats:
        """Of all layers and both ends."""
        ends = getattr(self.embedding, name) + getattr(self.last, name)
        return np.asarray(self.num_layers * getattr(self.layer, name) + ends)

    def of_first(self, name: str, layers: Any) -> Floats:
        """Of so many layers of the first stage, with its ends."""
        ends = getattr(self.embedding, name) + (self.p == 1) * getattr(self.last, name)
        return np.asarray(layers * getattr(self.layer, name) + ends)

    def of_others(self, name: str) -> Floats:
        """[stages, layouts]: of one chunk of each other stage, the first of those in front, the
        last of those behind; and of a shared head."""
        p, base, larger = self.p, self.base, self.larger
        found = []
        for stage in self.stages:
            behind = p - 1 - stage
            wide = np.minimum(larger, stage) + np.clip(larger - (self.v * p - behind), 0, behind)
            ends = (stage > 0) * getattr(self.embedding, name) + getattr(self.head, name)
            ends += (stage < p - 1) * getattr(self.last, name)
            found.append(((p - 1) * base + wide) * getattr(self.layer, name) + ends)
        return np.where(p == 1, 0.0, np.stack(found))


def _layer_row(case: Case, cluster: Cluster, effects: Effects) -> list[float]:
    prices = layer_prices(pricer_of(case, cluster, effects), rank_shape(case))
    return _row(case, prices)


def _end_rows(case: Case, cluster: Cluster, effects: Effects) -> list[list[float]]:
    """Of the embedding, what the last chunk has besides its layers, and a shared head."""
    embedding, last, head = end_prices(pricer_of(case, cluster, effects), case)
    empty = ChunkPrices(Spent(), Spent(), Spent(), Spent())
    return [_row(case, end) for end in (embedding, last, head or empty)]


def _row(case: Case, prices: ChunkPrices) -> list[float]:
    """Spent parts of a micro-batch, then _TIMES."""
    spent = prices.forward + prices.backward
    zero_bubble = float(SCHEDULES[case.layout.schedule].splits_backward)
    times = prices.forward.total_s, prices.backward.total_s, way_s(prices), weight_s(prices)
    return [*(getattr(spent, name) for name in _SPENT), *times, zero_bubble]


def _update_row(case: Case, cluster: Cluster, effects: Effects) -> list[float]:
    """The slower of the first and the last stage's update; the sum of tied embeddings."""
    pricer = pricer_of(case, cluster, effects)
    stages = {0, case.layout.pipeline - 1}
    return [
        max(update_seconds(pricer, case, stage) for stage in stages),
        embedding_seconds(pricer, case),
    ]


def _transfer(case: Case, cluster: Cluster, effects: Effects) -> float:
    return transfer_seconds(pricer_of(case, cluster, effects), case)


def _slow_down(case: Case, cluster: Cluster) -> float:
    return cluster.slow_down(cluster.link_of(pricer_of(case, cluster).group("pipeline")))


def _data(table: Table, cluster: Cluster, effects: Effects) -> DataPieces:
    def row(case: Case) -> list[float]:
        pieces = data_pieces(data_prices(case, pricer_of(case, cluster, effects), 0))
        return [getattr(pieces, field.name) for field in fields(DataPieces)]

    return DataPieces(*table.by(CUT, row))
