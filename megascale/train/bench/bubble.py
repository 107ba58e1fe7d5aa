"""`bench step --bubble`: the share of the pipeline bubble, measured at 1x and at 4x the batch.

MegaScale 3.1 takes a batch of four times the size with LAMB, so that one step stands for four, and
says that this "reduces 87.5 % of the pipeline bubbles". The expressions that the paper prints for
both give 75 % of the share of useful work, or 94 % (of 16 parts 15), and not 87.5 %. So what is
measured stands here, and the paper's figure beside it as its claim.

A stage is idle where its compute stream waits for neighbours or for the end of the step; the share
is of the step, the mean over stages. What the batch saves compares the idle time of one step at 4x
with that of four at 1x.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError
from megascale.train.bench.case import Case, make_case
from megascale.train.bench.measure import Run
from megascale.train.bench.rows import Origin, Row, measured

TIMES = (1, 4)
PAPER_CLAIM = 0.875


def bubble_cases(
    recipe: Path, overrides: Sequence[str], num_ranks: int, *, model: str | None, num_gpus: int
) -> list[Case]:
    """The case at each multiple of its batch. Raises ConfigError without a pipeline."""

    def case_of(settings: Sequence[str]) -> Case:
        wanted = [*overrides, "telemetry.enable=true", *settings]
        return make_case(recipe, wanted, num_ranks, model=model, num_gpus=num_gpus)

    first = case_of(())
    if first.config.parallelism.pipeline_parallel_size == 1:
        raise ConfigError(
            "--bubble is given and parallelism.pipeline_parallel_size is 1; only a pipeline has a "
            "bubble: set it to 2 or more"
        )
    batch = first.config.training.global_batch_size
    return [first] + [case_of([f"training.global_batch_size={n * batch}"]) for n in TIMES[1:]]


def measure_bubble(
    cases: Sequence[Case],
    rounds: int,
    origin: Origin,
    *,
    measure: Callable[[Case], Run],
    write: Callable[[Row], None],
) -> list[Row]:
    """Run the cases in turns, `rounds` times; a row each, the larger batch's beside the first's."""
    runs: list[list[Run]] = [[] for _ in cases]
    for _ in range(rounds):
        for of_case, case in zip(runs, cases, strict=True):
            of_case.append(measure(case))
    rows: list[Row] = []
    for times, case, of_case in zip(TIMES, cases, runs, strict=True):
        row = _row(times, case, of_case, rows[0] if rows else None, origin)
        write(row)
        rows.append(row)
    return rows


def _row(times: int, case: Case, runs: Sequence[Run], first: Row | None, origin: Origin) -> Row:
    par, mesh = case.config.parallelism, case.config.mesh(case.num_ranks)
    found = measured(runs)
    stages = [
        statistics.median(
            record.idle_share(step["step"])
            for run in runs
            for record in run.records
            if record.header.pp_rank == stage
            for step in run.timed
        )
        for stage in range(mesh.pipeline)
    ]
    share = statistics.fmean(stages)
    micro_batches = case.config.micro_batches(case.keys["gbs"], mesh.data)
    of_work = (mesh.pipeline - 1) / (par.virtual_pipeline_size * micro_batches)
    row: Row = {
        "bench": "bubble",
        "case": {
            **case.keys,
            **case.switches,
            "schedule": par.schedule,
            "share_head": par.share_head,
            "times": times,
        },
        "metric": "idle_share",
        "value": share,
        "stages": stages,
        "idle_s": share * found["step_s"],
        "formula": of_work / (1 + of_work),  # (p - 1) / (v m) of the work, as a share of the step
        "step_s": found["step_s"],
        "mfu": found["value"],
        "baselines": {},
        "met": None,
        **origin.now(),
    }
    if first is not None:
        row["saved"] = 1 - row["idle_s"] / (times * first["idle_s"])
        row["paper_claim"] = PAPER_CLAIM
    return row


def summary(rows: Sequence[Row]) -> str:
    """What was measured, and the paper's claim as what it is."""
    lines = [
        f"{row['case']['times']}x batch: idle {100 * row['value']:.2f} % of the step "
        f"(formula {100 * row['formula']:.2f} %)"
        for row in rows
    ]
    last: dict[str, Any] = rows[-1]
    lines.append(
        f"one step at {last['case']['times']}x is idle {100 * last['saved']:.1f} % less than "
        f"{last['case']['times']} steps at 1x; MegaScale 3.1 claims {100 * PAPER_CLAIM:.1f} %"
    )
    return "\n".join(lines)
