"""What came of a schedule: a table for people, rows of JSON for everybody else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.cluster.chaos.judge import Line
from megascale.cluster.chaos.verify import Check

_COLUMNS = (
    *("fault", "on", "at s", "noticed", "decided", "checked", "started", "first", "new"),
    *("lost", "cause", "named", "right", "closing event"),
)


@dataclass(frozen=True)
class JobResult:
    folder: str
    lines: list[Line]
    checks: list[Check]
    ettr: float | None
    newest_step: int


@dataclass(frozen=True)
class Result:
    """Of a schedule. `ok`: every fault was handled, and every property holds."""

    schedule: str
    jobs: list[JobResult]

    @property
    def lines(self) -> list[Line]:
        return sorted((line for job in self.jobs for line in job.lines), key=lambda x: x.number)

    @property
    def ok(self) -> bool:
        faults = all(line.handled or line.skipped for line in self.lines)
        return faults and all(check.ok for job in self.jobs for check in job.checks)

    def to_json(self) -> dict[str, Any]:
        """One object: `faults`, a row each, and `jobs` with their checks."""
        return {
            "schedule": self.schedule,
            "ok": self.ok,
            "faults": [line.to_json() for line in self.lines],
            "jobs": [
                {
                    "folder": job.folder,
                    "faults": [line.number for line in job.lines],
                    "ettr": job.ettr,
                    "newest_step": job.newest_step,
                    "checks": {
                        check.name: {"ok": check.ok, "wrong": list(check.wrong), "told": check.told}
                        for check in job.checks
                    },
                }
                for job in self.jobs
            ],
        }

    def text(self) -> str:
        """The table, then what is wrong, then the properties."""
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        lines = self.lines
        rows = [_cells(line) for line in lines if not line.skipped]
        yield from _table(_COLUMNS, rows)
        yield ""
        tried = [line for line in lines if not line.skipped]
        handled = sum(line.handled for line in tried)
        yield f"{handled} of {len(tried)} faults were handled as they must be"
        for line in tried:
            if line.wrong:
                yield f"  {line.number} {line.kind} {line.target}: {line.wrong}"
        for line in lines:
            if line.skipped:
                yield f"  {line.number} {line.kind}: left out, {line.skipped}"
        for job in self.jobs:
            if not job.checks:
                continue
            yield f"{job.folder}: step {job.newest_step}, ETTR {job.ettr or 0.0:.3f}"
            for check in job.checks:
                yield f"  {check.name}: {'ok' if check.ok else 'WRONG'}, {check.told}"
                yield from (f"    {wrong}" for wrong in check.wrong)

    def json_text(self) -> str:
        return json.dumps(self.to_json())


def _cells(line: Line) -> list[str]:
    seconds = (
        *(line.noticed_s, line.decided_s, line.checked_s),
        *(line.started_s, line.first_s, line.new_s),
    )
    right = {None: "", True: "right", False: "WRONG"}[line.right]
    return [
        f"{line.number} {line.kind}",
        line.target,
        f"{line.injected_s:.1f}",
        *("" if value is None else f"{value:.1f}" for value in seconds),
        "" if line.lost_steps is None else str(line.lost_steps),
        line.cause,
        line.named,
        right,
        line.closing,
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, ["-" * width for width in widths], *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
