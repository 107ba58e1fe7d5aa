"""What ranks reported out of the ordinary, and which checkpoints were written.

Asked by SQL, not as events: every rank reports its memory as an incident, which at 12,288 ranks is
most of what there is and nothing that happened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.telemetry.store.run import Run, Start

MOST = 200
MOST_CHECKPOINTS = 20
MOST_DETAIL = 300  # characters
ROUTINE = ("alone", "checkpoint", "checkpoint_copied", "resources", "roof", "waterfall")
"""Names of incidents that say how things are, not that something is wrong."""

_NOTABLE = f"name NOT IN ({', '.join(map(repr, ROUTINE))})"


@dataclass(frozen=True)
class Reported:
    """incidents, checkpoints: the newest, in order of time. num_incidents: all that there are."""

    incidents: Sequence[Mapping[str, Any]]
    num_incidents: int
    checkpoints: Sequence[Mapping[str, Any]]


def reported(run: Run) -> Reported:
    """What the store has, by wall time."""
    counted = run.query(f"SELECT count(*) AS n FROM incidents WHERE {_NOTABLE}")
    return Reported(
        [_incident(row, run.starts) for row in _newest(run, _NOTABLE, MOST)],
        int(counted.column("n")[0].as_py()),
        _checkpoints(run),
    )


def errors(run: Run) -> dict[str, str]:
    """By rank, the newest error that it reported in the newest start."""
    since_ns = run.starts[-1].unix_ns
    found = _newest(run, f"name IN ('error', 'nonfinite') AND t_ns >= {since_ns}", 10_000)
    return {str(row["rank"]): f"{row['name']}: {_told(row)}" for row in found}


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    """Every rank reports the checkpoint that it has a part of: one row a step."""
    rows = run.query(
        "SELECT step, max(t_ns) AS t_ns, arg_max(detail, t_ns) AS detail FROM incidents "
        "WHERE name = 'checkpoint' AND step IS NOT NULL GROUP BY step "
        "ORDER BY t_ns DESC, step DESC LIMIT ?",
        [MOST_CHECKPOINTS],
    ).to_pylist()[::-1]
    return [
        {"step": row["step"], "unix_s": row["t_ns"] / 1e9, "path": _detail(row).get("path", "")}
        for row in rows
    ]


def _newest(run: Run, where: str, most: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run.query(
        f"SELECT rank, step, name, t_ns, detail FROM incidents WHERE {where} "
        "ORDER BY t_ns DESC, rank LIMIT ?",
        [most],
    ).to_pylist()
    return rows[::-1]


def _incident(row: Mapping[str, Any], starts: Sequence[Start]) -> dict[str, Any]:
    return {
        "start": sum(start.unix_ns <= row["t_ns"] for start in starts[1:]),
        "rank": row["rank"],
        "name": row["name"],
        "step": row["step"],
        "unix_s": row["t_ns"] / 1e9,
        "detail": _told(row),
    }


def _told(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in _detail(row).items())[:MOST_DETAIL]


def _detail(row: Mapping[str, Any]) -> dict[str, Any]:
    found = json.loads(row["detail"] or "{}")
    return found if isinstance(found, dict) else {}
