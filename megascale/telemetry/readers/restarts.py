"""The starts of a run: what each restart cost, and the loss and MFU of each (MegaScale Fig. 11)."""

from __future__ import annotations

from typing import Any

import numpy as np

from megascale.telemetry.diagnose.history import (
    LOSS_DIFFERS,
    Restarted,
    Started,
    median_or_none,
    restarts,
)
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.shown import counted, percent, seconds, table
from megascale.telemetry.store.run import Run

_SHOWN = 12


def ask(run: Run, window: Window) -> Answer:  # noqa: ARG001 - a restart is asked about as a whole
    metrics = run.metrics()
    by_start: list[list[dict[str, Any]]] = [[] for _ in run.starts]
    for line in metrics:
        by_start[line["start"]].append(line)
    losses = [{m["step"]: m["loss"] for m in of if "loss" in m} for of in by_start]
    started = _started(run)
    found = restarts(started, losses)
    mfu = [median_or_none([m["mfu"] for m in of if "mfu" in m]) for of in by_start]
    lost_s = sum(one.lost_s for one in found)
    ends = [one.end_s for one in started if one.steps is not None]
    whole_s = max(ends) - started[0].begin_s if ends else 0.0
    differs = [one for one in found if (one.loss_change or 0.0) > LOSS_DIFFERS]
    return Answer(
        level="alert" if differs else "notice" if found else "ok",
        summary=_sentence(found, differs, lost_s, whole_s, mfu),
        data={
            "starts": [
                {
                    "number": one.number,
                    "begin_unix_s": round(one.begin_s, 3),
                    "epoch": run.starts[one.number].epoch,
                    "world_size": run.starts[one.number].world_size,
                    "first_step": None if one.steps is None else one.steps[0],
                    "last_step": None if one.steps is None else one.steps[1],
                    "mfu": mfu[one.number],
                    "steps": [m["step"] for m in by_start[one.number] if "loss" in m],
                    "loss": [m["loss"] for m in by_start[one.number] if "loss" in m],
                    "mfu_steps": [m["step"] for m in by_start[one.number] if "mfu" in m],
                    "mfus": [m["mfu"] for m in by_start[one.number] if "mfu" in m],
                }
                for one in started
            ],
            "restarts": [{**vars(one), "lost_s": round(one.lost_s, 3)} for one in found],
            "lost_s": round(lost_s, 3),
            "lost_share": round(lost_s / whole_s, 5) if whole_s > 0 else 0.0,
        },
        lines=_lines(started, found, mfu),
        caveats=run.caveats(),
    )


def _started(run: Run) -> list[Started]:
    rows = run.query(
        "SELECT start, rank, step, t0_ns + dur_ns AS end_ns, dur_ns FROM steps "
        "WHERE rank = (SELECT min(rank) FROM steps)"
    )
    start, step, end_ns, dur_ns = (
        rows.column(name).to_numpy() for name in ("start", "step", "end_ns", "dur_ns")
    )
    rank = int(rows.column("rank")[0].as_py()) if rows.num_rows else 0
    number = np.array([run.number_of(rank, int(one)) for one in start], np.int64)
    found = []
    for one in run.starts:
        own = number == one.number
        begin_s = one.unix_ns / 1e9
        if not own.any():
            found.append(Started(one.number, None, begin_s, begin_s, begin_s, 0.0))
            continue
        first = np.flatnonzero(own)[np.argmin(step[own])]
        found.append(
            Started(
                number=one.number,
                steps=(int(step[own].min()), int(step[own].max())),
                begin_s=begin_s,
                end_s=float(end_ns[own].max()) / 1e9,
                first_step_end_s=float(end_ns[first]) / 1e9,
                step_s=float(np.median(dur_ns[own])) / 1e9,
            )
        )
    return found


def _sentence(
    found: list[Restarted],
    differs: list[Restarted],
    lost_s: float,
    whole_s: float,
    mfu: list[float | None],
) -> str:
    if not found:
        return "the run was started once"
    replayed = sum(one.replayed[1] - one.replayed[0] + 1 for one in found if one.replayed)
    told = (
        f"{counted(len(found), 'restart')} lost {seconds(lost_s)} "
        f"({percent(lost_s / whole_s if whole_s else 0.0)} of the run), "
        f"{counted(replayed, 'step')} done again"
    )
    known = [value for value in mfu if value is not None]
    if len(known) > 1:
        told += f"; MFU {percent(min(known))} to {percent(max(known))} by start"
    if differs:
        worst = max(differs, key=lambda one: one.loss_change or 0.0)
        told += (
            f"; behind restart {worst.number} the loss of steps done again is another one (by "
            f"{percent(worst.loss_change or 0.0)}): state or data are not what they were"
        )
    return told


def _lines(started: list[Started], found: list[Restarted], mfu: list[float | None]) -> list[str]:
    by_number = {one.number: one for one in found}
    rows = [["start", "steps", "MFU", "at step", "done again", "down", "loss differs"]]
    for one in started[-_SHOWN:]:
        steps = "none" if one.steps is None else f"{one.steps[0]}-{one.steps[1]}"
        own = mfu[one.number]
        row = [str(one.number), steps, "" if own is None else percent(own)]
        cost = by_number.get(one.number)
        if cost is None:
            rows.append([*row, "", "", "", ""])
            continue
        again = "" if cost.replayed is None else f"{cost.replayed[0]}-{cost.replayed[1]}"
        change = "" if cost.loss_change is None else percent(cost.loss_change, 2)
        rows.append([*row, str(cost.at_step), again, seconds(cost.down_s), change])
    return table(rows)
