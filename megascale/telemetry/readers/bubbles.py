"""Measured idle time of pipeline stages against what the schedule alone predicts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from megascale.errors import DataError
from megascale.telemetry.diagnose.bubbles import Idle, idle, predicted
from megascale.telemetry.diagnose.straggler import COMPUTES
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import number_option, numbers, settings
from megascale.telemetry.shown import counted, percent, table
from megascale.telemetry.store.run import Run

DEFAULT_STEPS = 200
MOST_PIPELINES = 16
MOST_STEPS = 10
WORTH = 0.05  # of computing time above what is predicted
_SCHEDULES = {False: "1f1b", True: "interleaved_1f1b"}


def ask(run: Run, window: Window) -> Answer:
    if run.mesh.pipeline == 1:
        return Answer("ok", "there is no pipeline, so nothing waits for one", {"stages": 1})
    first, last = run.bounds(window, DEFAULT_STEPS)
    pipelines = _pipelines(run, window)
    names = ", ".join(f"'{name}'" for name in COMPUTES)
    rows = run.query(
        "WITH newest AS (SELECT DISTINCT step FROM current_spans WHERE step BETWEEN ? AND ? "
        f"AND name IN ({names}) ORDER BY step DESC LIMIT {MOST_STEPS}) "
        "SELECT rank, step, min(t0_ns) AS begin_ns, max(t0_ns + dur_ns) AS end_ns, "
        "sum(dur_ns)::BIGINT AS busy_ns, count(DISTINCT micro_batch) AS micro_batches "
        f"FROM current_spans WHERE step IN (FROM newest) AND name IN ({names}) "
        "AND rank IN (SELECT unnest(?::INTEGER[])) GROUP BY rank, step",
        (first, last, [rank for ranks in pipelines for rank in ranks]),
    ).to_pylist()
    found = idle(_computes(rows, pipelines))
    if found is None:
        raise DataError(
            f"no step from {first} to {last} has spans of all stages of a pipeline; ask for more "
            "steps (telemetry.span_interval says how often spans are recorded)"
        )
    micro_batches = max(int(row["micro_batches"]) for row in rows)
    return _answer(run, found, micro_batches, sorted({row["step"] for row in rows}), len(pipelines))


def _pipelines(run: Run, window: Window) -> list[list[int]]:
    """The ranks of some pipelines, stage by stage: those that are asked about, else a few evenly
    over all."""
    mesh = run.mesh
    per_stage = mesh.tensor * mesh.data
    if window.ranks is not None:
        firsts = sorted({int(rank) % per_stage for rank in window.ranks})
    else:
        most = min(number_option(window, "pipelines", MOST_PIPELINES), per_stage)
        firsts = np.unique(np.linspace(0, per_stage - 1, most).astype(int)).tolist()
    return [[first + stage * per_stage for stage in range(mesh.pipeline)] for first in firsts]


def _computes(
    rows: list[dict[str, Any]], pipelines: list[list[int]]
) -> dict[tuple[int, int], dict[int, tuple[float, float, float]]]:
    place = {
        rank: (number, stage)
        for number, ranks in enumerate(pipelines)
        for stage, rank in enumerate(ranks)
    }
    found: dict[tuple[int, int], dict[int, tuple[float, float, float]]] = defaultdict(dict)
    for row in rows:
        number, stage = place[row["rank"]]
        times = row["begin_ns"] / 1e9, row["end_ns"] / 1e9, row["busy_ns"] / 1e9
        found[row["step"], number][stage] = times
    return {key: of for key, of in found.items() if len(of) == len(pipelines[key[1]])}


def _answer(
    run: Run, found: Idle, micro_batches: int, steps: list[int], num_pipelines: int
) -> Answer:
    parallelism = settings(run, "parallelism")
    chunks = int(parallelism.get("virtual_pipeline_size") or 1)
    schedule = str(parallelism.get("pipeline_schedule") or "auto")
    schedule = _SCHEDULES[chunks > 1] if schedule == "auto" else schedule
    alone = predicted(schedule, run.mesh.pipeline, chunks, micro_batches)
    above = None if alone is None else found.bubble - alone
    busy = found.busy_s_P
    batches = counted(micro_batches, "micro-batch", "micro-batches")
    what = f"{schedule}, {run.mesh.pipeline} stages, {batches}"
    if alone is None:
        against = f"no formula is known for {what}"
    else:
        against = f"the schedule alone predicts {percent(alone)} ({what})"
    imbalance = (
        f"; stage {found.slowest} computes {percent(found.imbalance)} more than the mean"
        if found.imbalance >= WORTH
        else ""
    )
    worth = (above is not None and above >= WORTH) or found.imbalance >= WORTH
    return Answer(
        level="notice" if worth else "ok",
        summary=f"the slowest stage idles {percent(found.bubble)} of its computing time, "
        f"{against}; all stages together {percent(found.idle)}{imbalance}",
        data={
            "steps": steps,
            "num_pipelines": num_pipelines,
            "schedule": schedule,
            "stages": run.mesh.pipeline,
            "chunks_per_stage": chunks,
            "micro_batches": micro_batches,
            "idle_share": round(found.idle, 5),
            "bubble_share": round(found.bubble, 5),
            "predicted_share": None if alone is None else round(alone, 5),
            "imbalance_share": round(found.imbalance, 5),
            "stage_busy_s": numbers(busy, 6),
        },
        lines=table(
            [
                ["stage", "computes ms", "of the mean"],
                *(
                    [str(stage), f"{1e3 * one:.1f}", percent(float(one / busy.mean()))]
                    for stage, one in enumerate(busy)
                ),
            ]
        ),
        caveats=run.caveats(),
    )
