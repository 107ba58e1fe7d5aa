"""The loss: where it jumped, the gradient norm, steps that were skipped."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megascale.errors import DataError
from megascale.telemetry.diagnose.numerics import Spike, loss_spikes
from megascale.telemetry.readers.answer import Answer, Level, Window
from megascale.telemetry.shown import counted, table
from megascale.telemetry.store.run import Run

DEFAULT_STEPS = 1_000_000
NORM_SCATTERS = 0.25  # of itself: three times the usual is a jump of the gradient norm
_SHOWN = 8


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, DEFAULT_STEPS)
    lines = [m for m in run.metrics() if m["current"] and first <= m["step"] <= last]
    if not lines:
        raise DataError(
            f"metrics.jsonl of {run.run_dir} has no line of steps {first} to {last}; "
            "metrics.log_interval says how often one is written"
        )
    losses, norms = _series(lines, "loss"), _series(lines, "grad_norm")
    spikes = {
        "loss": loss_spikes(*_columns(losses)),
        "grad_norm": loss_spikes(*_columns(norms), smallest=NORM_SCATTERS),
    }
    skipped = max((int(m.get("skipped_steps") or 0) for m in lines), default=0)
    bad = [i for _, i in run.incidents() if i.name == "nonfinite" and i.step is not None]
    bad_steps = sorted({i.step for i in bad if i.step is not None and first <= i.step <= last})
    parameters = Counter(str(i.detail.get("parameter")) for i in bad if i.step in bad_steps)
    level: Level = (
        "alert" if spikes["loss"] else "notice" if spikes["grad_norm"] or bad_steps else "ok"
    )
    return Answer(
        level=level,
        summary=_sentence(spikes, losses, skipped, bad_steps, parameters),
        data={
            "first_step": first,
            "last_step": last,
            "steps": [step for step, _ in losses],
            "loss": [_finite(value) for _, value in losses],
            "grad_norm_steps": [step for step, _ in norms],
            "grad_norm": [_finite(value) for _, value in norms],
            "spikes": {
                name: [{**vars(one), "peak": _finite(one.peak)} for one in found]
                for name, found in spikes.items()
            },
            "skipped_steps": skipped,
            "nonfinite_steps": bad_steps,
            "nonfinite_parameters": dict(parameters),
        },
        lines=_lines(spikes),
        caveats=run.caveats(),
    )


def _series(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """A value that was not finite is known to be that."""
    found = []
    for line in lines:
        if name in line:
            found.append((int(line["step"]), float(line[name])))
        elif name in line.get("nonfinite", ()):
            found.append((int(line["step"]), float("nan")))
    return found


def _columns(series: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [value for _, value in series]


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _sentence(
    spikes: dict[str, list[Spike]],
    losses: list[tuple[int, float]],
    skipped: int,
    bad_steps: list[int],
    parameters: Counter[str],
) -> str:
    told = []
    for name, what in (("loss", "the loss"), ("grad_norm", "the gradient norm")):
        if spikes[name]:
            worst = max(spikes[name], key=lambda one: one.peak - one.usual)
            steps = f"step {worst.first_step}"
            if worst.last_step > worst.first_step:
                steps = f"steps {worst.first_step} to {worst.last_step}"
            others = len(spikes[name]) - 1
            more = f", and {counted(others, 'more time')}" if others else ""
            told.append(
                f"{what} jumped to {worst.peak:.3f} from {worst.usual:.3f} at {steps}{more}"
            )
    if bad_steps:
        named = ", ".join(name for name, _ in parameters.most_common(2))
        told.append(
            f"gradients were not finite in {counted(len(bad_steps), 'step')}, the last "
            f"{bad_steps[-1]} ({named})"
        )
    if skipped:
        told.append(f"{counted(skipped, 'step')} skipped")
    if told:
        return "; ".join(told)
    if not losses:
        return "no loss was logged"
    return (
        f"the loss went from {losses[0][1]:.3f} to {losses[-1][1]:.3f} over steps {losses[0][0]} "
        f"to {losses[-1][0]} without a jump"
    )


def _lines(spikes: dict[str, list[Spike]]) -> list[str]:
    rows = [["what", "first step", "last step", "peak", "usual"]]
    for name, found in spikes.items():
        for one in found[-_SHOWN:]:
            steps = [str(one.first_step), str(one.last_step)]
            rows.append([name, *steps, f"{one.peak:.4f}", f"{one.usual:.4f}"])
    return table(rows) if len(rows) > 1 else []
