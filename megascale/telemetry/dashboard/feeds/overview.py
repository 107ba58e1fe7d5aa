"""The run at a glance: what it is, how far it is, what happened; and its metrics as columns.

Made once a revision by the thread that holds the run, and answered from memory ever after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.errors import DataError
from megascale.telemetry.dashboard.feeds.incidents import reported
from megascale.telemetry.store.run import Run, Start

_NOT_CURVES = frozenset({"step", "time", "start", "current", "nonfinite"})


@dataclass(frozen=True)
class Summary:
    """What is known of a revision without asking the run again.

    overview     of `/api/overview`, but the driver's part
    metrics      the lines of metrics.jsonl, each with `start` and `current`
    newest_step  None: no step has ended yet
    """

    overview: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    newest_step: int | None


def summarise(run: Run) -> Summary:
    """Everything that the first look at the page needs."""
    found = reported(run)
    metrics = run.metrics()
    steps = _steps(run)
    mesh, places = run.mesh, run.places
    overview = {
        "run_dir": str(run.run_dir),
        "name": run.run_dir.resolve().name,
        "description": _description(run.config),
        "mesh": {"tensor": mesh.tensor, "data": mesh.data, "pipeline": mesh.pipeline},
        "world_size": mesh.world_size,
        "num_ranks": len(places.rank_R),
        "num_hosts": len(set(places.host_R)),
        "starts": [_start(one) for one in run.starts],
        "first_step": None if steps is None else steps[0],
        "newest_step": None if steps is None else steps[1],
        "num_steps": _planned_steps(run.config),
        "newest": _newest(metrics),
        "incidents": found.incidents,
        "num_incidents": found.num_incidents,
        "checkpoints": found.checkpoints,
        "caveats": run.caveats(),
    }
    return Summary(overview, metrics, None if steps is None else steps[1])


def metric_columns(metrics: Sequence[Mapping[str, Any]], after: int) -> dict[str, Any]:
    """The lines from number `after` on, as columns; absent values are None.

    next     what to give as `after` next time
    columns  step, time_s, start, and each value that any of these lines has
    """
    after = min(max(0, after), len(metrics))
    lines = metrics[after:]
    names = sorted({name for line in lines for name in line} - _NOT_CURVES)
    columns: dict[str, list[Any]] = {
        "step": [line.get("step") for line in lines],
        "time_s": [line.get("time") for line in lines],
        "start": [line.get("start", 0) for line in lines],
        "current": [bool(line.get("current", True)) for line in lines],
    }
    for name in names:
        columns[name] = [_short(line.get(name)) for line in lines]
    return {"next": len(metrics), "columns": columns}


def _short(value: Any) -> float | None:
    """Six digits: more cannot be seen, and the columns of 30,000 steps are half as long."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _steps(run: Run) -> tuple[int, int] | None:
    try:
        return run.steps()
    except DataError:
        return None


def _newest(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last value of everything that was ever logged: validation comes rarely."""
    newest: dict[str, Any] = {}
    for line in metrics:
        newest.update(line)
    return {k: v for k, v in newest.items() if isinstance(v, int | float) and math.isfinite(v)}


def _start(one: Start) -> dict[str, Any]:
    return {
        "number": one.number,
        "epoch": one.epoch,
        "unix_s": one.unix_ns / 1e9,
        "world_size": one.world_size,
        "num_ranks": one.num_ranks,
        "steps": None if one.steps is None else list(one.steps),
    }


def _description(config: Mapping[str, Any] | None) -> str:
    return str(_at(config, "job", "description") or "")


def _planned_steps(config: Mapping[str, Any] | None) -> int | None:
    steps = _at(config, "training", "steps")
    return steps if isinstance(steps, int) else None


def _at(config: Mapping[str, Any] | None, section: str, key: str) -> Any:
    inside = (config or {}).get(section)
    return inside.get(key) if isinstance(inside, Mapping) else None
