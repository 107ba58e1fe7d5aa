"""A step's time by class over time, and MFU over steps."""

from __future__ import annotations

import statistics

import numpy as np

from megascale.telemetry.diagnose.decomposition import MEANING, classes
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import numbers
from megascale.telemetry.readers.host_held import host_held
from megascale.telemetry.shown import percent, seconds, table
from megascale.telemetry.store.run import Run

DEFAULT_STEPS = 1000
MOST_BUCKETS = 200
_WATERFALL = (
    "operators by class, to the residual: set telemetry.waterfall = true, or measure with "
    "`megascale bench step RECIPE --waterfall`"
)


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, DEFAULT_STEPS)
    means = run.step_means(first, last)
    step_ms_S = run.mean_step_s(means.step_S) * 1e3
    phase_ms = {name: values[:, 0] / 1e6 for name, values in means.ns_SR.items()}
    of = classes(phase_ms, step_ms_S)
    parts = np.array_split(np.arange(len(means.step_S)), min(MOST_BUCKETS, len(means.step_S)))
    total_ms = float(np.nanmean(step_ms_S))
    shares = {name: float(np.nanmean(values)) / total_ms for name, values in of.items()}
    mfu = [(m["step"], m["mfu"]) for m in run.metrics() if m["current"] and "mfu" in m]
    mfu = [(step, value) for step, value in mfu if first <= step <= last]
    largest = sorted(shares, key=lambda name: -shares[name])
    told = ", ".join(f"{name} {percent(shares[name])}" for name in largest if shares[name] >= 0.01)
    usual_mfu = statistics.median(value for _, value in mfu) if mfu else None
    of_mfu = f"; MFU {percent(usual_mfu)}" if usual_mfu is not None else ""
    held = host_held(run, first, last)
    of_host = "" if held is None else f"; {held.told()}"
    return Answer(
        level="ok" if held is None else "notice",
        summary=f"a step takes {seconds(total_ms / 1e3)}, of which {told}{of_mfu}{of_host} "
        f"(steps {first} to {last})",
        data={
            "first_step": first,
            "last_step": last,
            "steps": [int(means.step_S[part[0]]) for part in parts],
            "step_ms": numbers(np.nanmean(step_ms_S[part]) for part in parts),
            "class_ms": {
                name: numbers(np.nanmean(values[part]) for part in parts)
                for name, values in of.items()
            },
            "shares": {name: round(share, 5) for name, share in shares.items()},
            "held_by_host": None if held is None else vars(held),
            "mfu_steps": [step for step, _ in mfu],
            "mfu": [value for _, value in mfu],
        },
        lines=[*_lines(shares, total_ms), _WATERFALL],
        caveats=run.caveats()
        + ([] if mfu else ["no MFU was logged: the device is unknown (metrics.peak_tflops)"]),
    )


def _lines(shares: dict[str, float], total_ms: float) -> list[str]:
    rows = [["class", "ms", "share", "what"]]
    for name, share in shares.items():
        rows.append([name, f"{share * total_ms:.2f}", percent(share), MEANING[name]])
    width = max(len(row[3]) for row in rows)
    return table([[*row[:3], row[3].ljust(width)] for row in rows])
