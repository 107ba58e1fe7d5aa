"""`bench step --waterfall`: where the time of a step goes, its row and its table.

The events of one run with every operator marked, cut by `train/waterfall/account.py`. A number is
the mean over the timed steps and over ranks; each rank's own are in the row too, because the stages
of a pipeline differ. The cross-check runs the same step without its communication: what a rank
loses by that should be what the waterfall calls exposed, bubble included, since a stage that waits
for nobody has none.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megascale.config import RunConfig
from megascale.errors import ConfigError
from megascale.events import Span
from megascale.plan.actions import PipelineShape
from megascale.telemetry.overlap import travelling
from megascale.train.bench.beside import Beside
from megascale.train.bench.case import Case
from megascale.train.bench.measure import Run, check_losses
from megascale.train.bench.records import RankRecord
from megascale.train.bench.rows import Origin, Row, peak_of
from megascale.train.waterfall.account import (
    CLASSES,
    StepTimes,
    corrected,
    names_of,
    times_of,
)
from megascale.train.waterfall.bubble import SPAN_OF, Compute, idle_ns

MOST_RESIDUAL = 0.03
MARKED = (
    "telemetry.enable=true",
    "telemetry.waterfall=true",
    "telemetry.span_interval=1",
    "telemetry.buffer_events=1000000",
)
# What a run without communication needs: its numbers are meaningless, and its GEMMs cuBLAS's own.
SILENT = (
    "parallelism.flux=reference",
    "training.nonfinite_policy=skip",
    "training.max_nonfinite_steps=1000000",
)
EXPOSED = ("tp", "pp", "dp", "bubble")
Classes = dict[str, float]
"""ms of a step by class, in the order of CLASSES."""


def details_ms(run: Run) -> dict[str, float]:
    """ms of a step by operator and pass, and of the residual by what it is in: the mean over steps
    and ranks, before any correction."""
    total: dict[str, float] = defaultdict(float)
    steps = [step["step"] for step in run.timed]
    for record in run.records:
        for number in steps:
            times = _times(record, number)
            for (work, operator, name), (ns, _) in times.by_key().items():
                total[f"{work} {operator} {name.removeprefix('op_')}"] += ns / 1e6
            for name, ns in times.residual.items():
                total[f"residual {name}"] += ns / 1e6
    count = len(steps) * len(run.records)
    return {name: ms / count for name, ms in sorted(total.items())}


def _times(record: RankRecord, number: int) -> StepTimes:
    end_ns = record.steps[number + 1].t0_ns
    names = names_of(record.header)
    return times_of(record.steps[number], end_ns, record.spans[number], names)


def waterfalls(run: Run, case: Case, peak_tflops: float | None) -> list[Classes]:
    """Of every rank, over the timed steps.

    peak_tflops  of a device; None: there is no ideal, and all of a GEMM's time is "inefficiency"
    Raises ConfigError where events were lost.
    """
    config = case.config
    steps = [step["step"] for step in run.timed]
    for record in run.records:
        if record.num_dropped:
            raise ConfigError(
                f"rank {record.header.rank} lost {record.num_dropped} events, so its times do not "
                "add up; measure fewer layers or micro-batches, or raise telemetry.buffer_events"
            )
    idle = {
        (step, record.header.rank): _idle_ns(config, run.records, record, step)
        for step in steps
        for record in run.records
    }
    found = []
    for record in run.records:
        of_steps = [
            _of_step(record, step, idle[step, record.header.rank], peak_tflops) for step in steps
        ]
        found.append({name: statistics.fmean(one[name] for one in of_steps) for name in CLASSES})
    return found


def _of_step(record: RankRecord, number: int, bubble_ns: int, peak_tflops: float | None) -> Classes:
    spans, times = record.spans[number], _times(record, number)
    flops: Mapping[str, int] = record.said["waterfall"][0]["gemm_flops"]
    gemm_flops = sum(flops[str(s.chunk)] for s in spans if s.name in ("forward", "head"))
    alone = record.said.get("alone", [{}])[0].get("operators", {})
    found = corrected(
        times,
        gemm_ideal_ns=gemm_flops / peak_tflops / 1e3 if peak_tflops else 0.0,
        alone_ns=alone,
        travelling=travelling([*record.spans.get(number - 1, ()), *spans]),
        bubble_ns=bubble_ns,
    )
    return {name: ns / 1e6 for name, ns in found.items()}


def _idle_ns(config: RunConfig, records: Sequence[RankRecord], own: RankRecord, step: int) -> int:
    """What the schedule alone makes this rank's stage wait in a step."""
    par, header = config.parallelism, own.header
    if header.pipeline == 1:
        return 0
    durations: dict[Compute, int] = {}
    num_forwards = 0
    for record in records:
        there = record.header
        if (there.tp_rank, there.dp_rank) != (header.tp_rank, header.dp_rank):
            continue
        for span in record.spans[step]:
            if span.chunk is None or span.micro_batch is None:
                continue
            name, place, took = span.name, span.chunk, span.dur_ns
            if name == "head":  # a meeting: what it waits inside is none of its work
                place, took = there.pp_rank, took - _meeting_ns(span, record.spans[step])
            if name in SPAN_OF.values():
                key = (name, place, span.micro_batch)
                durations[key] = durations.get(key, 0) + took
                num_forwards += name == "forward"
    shape = PipelineShape(
        header.pipeline, par.virtual_pipeline_size, num_forwards // par.num_chunks
    )
    idle = idle_ns(par.schedule, shape, durations, shared_head=par.share_head)
    return idle[header.pp_rank]


def _meeting_ns(head: Span, spans: Sequence[Span]) -> int:
    """What a part of a shared head spends in exchanges with other stages."""
    end_ns = head.t0_ns + head.dur_ns
    inside = [s for s in spans if s.work == "pp" and head.t0_ns <= s.t0_ns < end_ns]
    return sum(s.dur_ns for s in inside)


def cross_check(run: Run, silent: Run, classes: Sequence[Classes]) -> dict[str, Any]:
    """What each rank's step loses without communication, beside what the waterfall calls exposed.

    `difference` is of the step, where it is largest.
    """
    of_ranks = []
    steps = [step["step"] for step in run.timed]
    for record, quiet, own in zip(run.records, silent.records, classes, strict=True):
        step_ms = _window_ms(record, steps)
        filling_ms = statistics.fmean(quiet.total_ns(n, "silent_fill") / 1e6 for n in steps)
        silent_ms = _window_ms(quiet, steps) - filling_ms
        exposed_ms = sum(own[name] for name in EXPOSED)
        of_ranks.append(
            {
                "step_ms": step_ms,
                "silent_ms": silent_ms,
                "exposed_ms": exposed_ms,
                "difference": (step_ms - silent_ms - exposed_ms) / step_ms,
            }
        )
    worst = max(of_ranks, key=lambda one: abs(one["difference"]))
    return {"difference": worst["difference"], "ranks": of_ranks}


def _window_ms(record: RankRecord, steps: Sequence[int]) -> float:
    """From the begin of a step to that of the next: the mean."""
    return statistics.fmean(
        (record.steps[n + 1].t0_ns - record.steps[n].t0_ns) / 1e6 for n in steps
    )


def mean_of(classes: Sequence[Classes]) -> Classes:
    return {name: statistics.fmean(one[name] for one in classes) for name in CLASSES}


def waterfall_row(
    case: Case, run: Run, classes: Sequence[Classes], origin: Origin, check: dict[str, Any] | None
) -> Row:
    """The row; its value is the share of the step that no class claims."""
    mean = mean_of(classes)
    step_ms = sum(mean.values())
    residual = mean["residual"] / step_ms
    row: Row = {
        "bench": "waterfall",
        "case": {**case.keys, **case.switches},
        "metric": "residual",
        "value": residual,
        "step_ms": step_ms,
        "ms": mean,
        "shares": {name: ms / step_ms for name, ms in mean.items()},
        "ranks_ms": list(classes),
        "details_ms": details_ms(run),
        "alone_ns": [record.said.get("alone", [{}])[0] for record in run.records],
        "baselines": {},
        "target": {"op": "<=", "value": MOST_RESIDUAL},
        "met": residual <= MOST_RESIDUAL,
        **run.facts,
        **origin.now(),
    }
    if check is not None:
        row["cross_check"] = check
    return row


def table(row: Row) -> str:
    """The waterfall as text, from peak to achieved."""
    lines = [f"{'class':<18}{'ms':>10}{'share':>9}"]
    lines += [
        f"{name:<18}{row['ms'][name]:>10.3f}{100 * row['shares'][name]:>8.2f} %" for name in CLASSES
    ]
    lines.append(f"{'step':<18}{row['step_ms']:>10.3f}{100:>8.2f} %")
    check = row.get("cross_check")
    if check is not None:
        lines.append(
            f"without communication the step loses what is exposed within "
            f"{100 * abs(check['difference']):.2f} % of it"
        )
    return "\n".join(lines)


def run_waterfall(
    case: Case,
    origin: Origin,
    *,
    measure: Callable[[Case, Beside], Run],
    silent_case: Case | None,
) -> Row:
    """Measure `case`, and where given the same one without its communication; its row."""
    run = measure(case, Beside(alone=True))
    check_losses(run, case.config)
    classes = waterfalls(run, case, peak_of(case.config, run))
    check = None
    if silent_case is not None:
        silent = measure(silent_case, Beside(silent=True))
        check = cross_check(run, silent, classes)
    return waterfall_row(case, run, classes, origin, check)
