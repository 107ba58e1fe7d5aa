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
    p, v = table.pipeline, table.virtual
    layer = _Rows(table.by(LAYER, lambda case: _layer_row(case, cluster, effects)))
    ends = table.by(END, lambda case: _end_rows(case, cluster, effects))
    embedding, last, head = (_Rows(rows) for rows in ends)
    one = p == 1
    base, larger = np.divmod(table.job.model.num_layers, p * v)
    # the first, the last, and of those with a layer more the last: it has most in front of it
    stages = (0 * p, np.where(larger > 0, (larger - 1) % p, 0), p - 1)

    def layers_of(stage: Any) -> Any:
        return v * base + np.clip(-((stage - larger) // p), 0, v)

    def busy(stage: Any) -> Floats:
        of_ends = (stage == 0) * embedding.spent + (stage == p - 1) * last.spent + head.spent
        return np.asarray(layers_of(stage) * layer.spent + of_ends)

    def of_others(name: str) -> Floats:
        of_layer, *of_ends = (getattr(rows, name) for rows in (layer, embedding, last, head))
        found = []
        for stage in stages:
            before = stage * base + np.minimum(larger, stage)
            behind = p - 1 - stage
            layers = before + behind * base + np.clip(larger - (v * p - behind), 0, behind)
            ends_s = (stage > 0) * of_ends[0] + (stage < p - 1) * of_ends[1] + of_ends[2]
            found.append(layers * of_layer + ends_s)
        return np.where(one, 0.0, np.stack(found))

    def of_first(name: str, layers: Any) -> Floats:
        of_layer, *of_ends = (getattr(rows, name) for rows in (layer, embedding, last))
        return np.asarray(layers * of_layer + of_ends[0] + one * of_ends[1])

    joined = table.join_weight_gradients
    zero_bubble = layer.zero_bubble.astype(bool)
    whole = ~zero_bubble & (joined == 1)
    way, weight = (
        table.job.model.num_layers * getattr(layer, name)
        + getattr(embedding, name)
        + getattr(last, name)
        for name in ("way", "weight")
    )
    updates = table.by(CUT, lambda case: _update_row(case, cluster, effects))
    return StepPieces(
        pipeline=p,
        virtual=v,
        micro_batches=table.micro_batches,
        busy=np.stack([busy(stage) for stage in stages], axis=1),
        ways_s=of_others("way"),
        weights_s=of_others("weight"),
        round_s=way + np.where(whole, weight, 0.0),
        forward_s=of_first("forward", base + (larger > 0)),
        backward_s=of_first("backward", base + (larger > 0)),
        stage_forward_s=of_first("forward", layers_of(0)),
        stage_backward_s=of_first("backward", layers_of(0)),
        whole=whole,
        zero_bubble=zero_bubble,
        joined=joined,
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
