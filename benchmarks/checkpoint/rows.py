"""Rows: the lines of a table with case, value, target, and whether it is met."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.train.bench.rows import Origin

_MEETS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Line:
    """case    "line", and what it varies over

    target  ("<=" or ">=", value); None: there is none
    more    fields beside the value
    """

    case: Mapping[str, Any]
    metric: str
    value: float
    target: tuple[str, float] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def row(self, origin: Origin, bench: str) -> dict[str, Any]:
        row: dict[str, Any] = {"bench": bench, "case": dict(self.case), "metric": self.metric}
        row["value"] = self.value
        if self.target is not None:
            op, value = self.target
            row |= {"target": {"op": op, "value": value}, "met": _MEETS[op](self.value, value)}
        return {**row, **self.more, **origin.now()}


def write_rows(
    lines: Iterable[Line], origin: Origin, output: Path | None, bench: str = "checkpoint"
) -> None:
    """Print each row, and append it to `output`."""
    for line in lines:
        row = line.row(origin, bench)
        told = f", target {' '.join(map(str, line.target))}: {row['met']}" if line.target else ""
        print(f"{dict(line.case)}: {line.value:.5g} {line.metric}{told}", flush=True)
        if output:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
