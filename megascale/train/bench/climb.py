"""Climb the ladder: every rung in turn, `rounds` times over (A B C A B C), each run checked.

A rung whose run fails or computes something else is out, for this round and those after it, and the
others go on; only a run that somebody stopped ends the climb. Rows are final, and written, in the
last round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.errors import MegascaleError
from megascale.train.bench.case import Case
from megascale.train.bench.ladder import Planned
from megascale.train.bench.measure import Run, check_losses, check_same
from megascale.train.launch import StoppedError

Row = dict[str, Any]


@dataclass
class Climb:
    """What was measured, by the rung's name. A rung has a row or a reason for none."""

    planned: Sequence[Planned]
    rows: dict[str, Row] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def climb(
    found: Climb,
    rounds: int,
    *,
    measure: Callable[[Case], Run],
    make_row: Callable[[Planned, Sequence[Run], Sequence[Row]], Row],
    say: Callable[[str], None],
) -> None:
    """Run all rungs of `found` and fill it. Raises StoppedError where a run was stopped.

    measure   a run of a case; a MegascaleError is this rung's failure
    make_row  from a rung, its runs and the rows of the rungs below; also writes the row
    """
    runs: dict[str, list[Run]] = {}
    references: dict[str, Run] = {}  # the first run of each mathematics that passed its checks
    for round_number in range(1, rounds + 1):
        for plan in found.planned:
            name = plan.rung.name
            if plan.case is None or name in found.failed:
                continue
            say(f"{name}, round {round_number} of {rounds}: {' '.join(plan.settings)}")
            try:
                run = _checked(plan, plan.case, references, measure)
            except StoppedError:
                raise
            except MegascaleError as error:
                found.failed[name] = str(error)
                say(f"{name}: {error}")
                continue
            references.setdefault(plan.mathematics, run)
            runs.setdefault(name, []).append(run)
            if round_number == rounds:
                found.rows[name] = make_row(plan, runs[name], list(found.rows.values()))


def _checked(
    plan: Planned, case: Case, references: dict[str, Run], measure: Callable[[Case], Run]
) -> Run:
    """A run whose values are right. Raises MegascaleError for one that is not to be had."""
    reference = references.get(plan.mathematics)
    if reference is None and plan.rung.same_mathematics:
        raise MegascaleError(
            f"not run: its losses must be those of {plan.mathematics!r}, which has none"
        )
    run = measure(case)
    check_losses(run, case.config)
    if reference is not None:
        check_same(run, reference, case.config.training.dtype, plan.mathematics)
    return run


def table(found: Climb) -> str:
    """The ladder as text; gains in points of MFU, throughput over the rung before."""
    titles = ["rung", "paper", "step_s", "mfu", "gain", "sum", "tokens/s", "paper's gain"]
    lines = [titles]
    for plan in found.planned:
        rung = plan.rung
        row = found.rows.get(rung.name)
        if row is None:
            reason = plan.left_out or f"no row: {found.failed.get(rung.name, 'not reached')}"
            cells = [rung.name, rung.section, reason.splitlines()[0]]
        else:
            cells = [
                rung.name,
                rung.section,
                f"{row['step_s']:.4g}",
                _points(row["value"], sign=False),
                _points(row["gain"]),
                _points(row["sum_of_gains"]),
                "" if row["speedup"] is None else f"x{row['speedup']:.3f}",
            ]
            cells.append(_points(rung.paper_gain))
        lines.append(cells)
    full = [cells for cells in lines if len(cells) == len(titles)]
    widths = [max(len(cells[i]) for cells in full) for i in range(len(titles))]
    widths[0] = max(len(cells[0]) for cells in lines)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip()
        for cells in lines
    )


def _points(share: float | None, *, sign: bool = True) -> str:
    if share is None:
        return ""
    return f"{100 * share:+.2f}" if sign else f"{100 * share:.2f}"
