"""Rows of `telemetry` that are measured on this machine's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascale.flux.bench.rows import append
from megascale.train.bench.rows import Origin

RESULTS = Path("benchmarks/results/telemetry.jsonl")


class Rows:
    """Prints and appends rows; all of one command."""

    def __init__(self, command: str, commit: str | None, output: Path = RESULTS) -> None:
        self._output = output
        self._origin = Origin.here(
            num_ranks=0, on_gpus=False, command=command, given_commit=commit or None
        )

    def add(
        self,
        line: str,
        metric: str,
        value: float,
        op: str,
        target: float,
        *,
        of: str,
        ranks: int,
        **beside: Any,
    ) -> bool:
        """Whether the target is met. op: "<=" or ">="; `beside` are fields beside the value."""
        met = value <= target if op == "<=" else value >= target
        row = {
            "bench": "telemetry",
            "case": {"line": line, "of": of, "ranks": ranks},
            "metric": metric,
            "value": round(value, 6),
            "target": {"op": op, "value": target},
            "met": met,
            **beside,
            **self._origin.now(),
        }
        append(self._output, row)
        print(f"{line:28} {of:44} {value:10.4f} {metric} {op} {target:g}: {met}  {beside}")
        return met
