"""One screen: what run this is, how fast, what is wrong, and which reader to ask next."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from megascale.errors import DataError
from megascale.telemetry.diagnose.late import LEAST
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Answer, Level, Window
from megascale.telemetry.readers.asking import settings
from megascale.telemetry.shown import counted, percent, seconds
from megascale.telemetry.store.run import Run

DEFAULT_STEPS = 100
ASKED = (
    *("hang", "loss", "memory", "stragglers", "late", "drift", "network", "heat_map"),
    *("communication", "bubbles", "restarts"),
)
"""In the order of urgency among findings of one level."""
MANY_RANKS = 1024  # from here on `late` is asked of few steps: it scans every span of them
LATE_STEPS = LEAST + 2  # with spans, of many ranks: as many as can call a rank late
_RANK: dict[Level, int] = {"alert": 0, "notice": 1, "ok": 2}


def ask(run: Run, window: Window) -> Answer:
    answers: dict[str, Answer] = {}
    silent: dict[str, str] = {}
    for name in ASKED:
        try:
            answers[name] = READERS[name].ask(run, _window(run, name, window))
        except DataError as error:
            silent[name] = str(error)
    found = sorted(
        ((name, one) for name, one in answers.items() if one.level != "ok"),
        key=lambda pair: _RANK[pair[1].level],
    )
    speed, data = _speed(run, window)
    level = found[0][1].level if found else "ok"
    return Answer(
        level=level,
        summary=_sentence(speed, found),
        data={
            **data,
            "findings": [
                {"reader": name, "level": one.level, "summary": one.summary} for name, one in found
            ],
            "well": [name for name, one in answers.items() if one.level == "ok"],
            "not_asked": silent,
        },
        lines=[*_identity(run), "", *_findings(found), *_rest(answers, silent)],
        caveats=run.caveats(),
    )


def _window(run: Run, name: str, window: Window) -> Window:
    """What reader `name` is asked about. 400 steps of 12,288 ranks are 40 million spans."""
    first, last = window.first_step, window.last_step
    if name == "late" and first is None and run.mesh.world_size >= MANY_RANKS:
        interval = int(settings(run, "telemetry").get("span_interval") or 1)
        first, _ = run.bounds(Window(last_step=last), LATE_STEPS * interval)
    return Window(first, last, ranks=window.ranks)


def _speed(run: Run, window: Window) -> tuple[str, dict[str, Any]]:
    try:
        first, last = run.bounds(window, DEFAULT_STEPS)
    except DataError:
        return "no step is finished", {"first_step": None, "last_step": None}
    step_s = float(np.nanmedian(run.mean_step_s(np.arange(first, last + 1))))
    lines = [m for m in run.metrics() if m["current"] and first <= m["step"] <= last]
    mfu = [m["mfu"] for m in lines if "mfu" in m]
    tokens = [m["tokens_per_s"] for m in lines if "tokens_per_s" in m]
    told = f"step {last}, {seconds(step_s)} a step"
    if tokens:
        told += f", {statistics.median(tokens):,.0f} tokens/s"
    if mfu:
        told += f", MFU {percent(statistics.median(mfu))}"
    return told, {
        "first_step": first,
        "last_step": last,
        "step_s": round(step_s, 6),
        "tokens_per_s": statistics.median(tokens) if tokens else None,
        "mfu": statistics.median(mfu) if mfu else None,
        "loss": lines[-1].get("loss") if lines else None,
        "num_steps_planned": settings(run, "training").get("steps"),
        "num_ranks": len(run.places.rank_R),
        "num_hosts": len(set(run.places.host_R)),
        "num_starts": len(run.starts),
        "tensor": run.mesh.tensor,
        "data": run.mesh.data,
        "pipeline": run.mesh.pipeline,
    }


def _sentence(speed: str, found: Sequence[tuple[str, Answer]]) -> str:
    if not found:
        return f"{speed}; nothing is wrong"
    name, top = found[0]
    return f"{speed}; {name}: {top.summary}"


def _identity(run: Run) -> list[str]:
    mesh = run.mesh
    hosts = len(set(run.places.host_R))
    planned = settings(run, "training").get("steps")
    degrees = f"tensor {mesh.tensor}, data {mesh.data}, pipeline {mesh.pipeline}"
    ranks = f"{counted(mesh.world_size, 'rank')} on {counted(hosts, 'host')}"
    lines = [f"{run.run_dir.name}: {ranks}, {degrees}"]
    try:
        first, last = run.steps()
    except DataError:
        return [*lines, f"{counted(len(run.starts), 'start')}, no step finished"]
    of = f" of {planned}" if planned else ""
    return [*lines, f"steps {first} to {last}{of}, {counted(len(run.starts), 'start')}"]


def _findings(found: Sequence[tuple[str, Answer]]) -> list[str]:
    if not found:
        return ["nothing is wrong"]
    return [f"{one.level:6}  {name}: {one.summary}" for name, one in found]


def _rest(answers: dict[str, Answer], silent: dict[str, str]) -> list[str]:
    well = [name for name, one in answers.items() if one.level == "ok"]
    lines = [""]
    if well:
        lines.append(f"well: {', '.join(well)}")
    lines += [f"not asked: {name} ({why})" for name, why in silent.items()]
    worst = next((name for name, one in answers.items() if one.level == "alert"), None)
    worst = worst or next((name for name, one in answers.items() if one.level == "notice"), None)
    lines.append(f"ask next: megascale diagnose RUN {worst or 'decomposition'}")
    return lines
