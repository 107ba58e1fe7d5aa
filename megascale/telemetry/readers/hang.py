"""Who holds up a run that stands still (MegaScale 5.2): from the ongoing events of its ranks.

A record counts while its rank has not finished the step of it; one with an error counts in any
case, because an error ends its step. The ranks that should have recorded and did not are the
suspects; of ranks that all recorded, the one that left out what the others wait for
(`diagnose/ongoing.py`). The data has a value a rank, in the order of ranks, for the 3D view.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megascale.events import Ongoing
from megascale.telemetry.diagnose.ongoing import Stall, stalled
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import hosts
from megascale.telemetry.shown import counted, named, ranks_text, seconds, table
from megascale.telemetry.store.run import Run

STATES = ("ok", "waiting", "silent")
"""`state` of a rank is the place in this list."""

_SETTLED_S = 5.0  # ranks come to a stand within a step or two, and see it within a second
_MOST_MEETINGS = 64
_SHOWN = 12


def ask(run: Run, window: Window) -> Answer:  # noqa: ARG001 - a stand is of no window
    last_step = _last_steps(run)
    records = _still_waiting(run.ongoing(), last_step)
    stall = stalled(records, run.mesh)
    if stall is None:
        step = max(last_step.values(), default=None)
        so_far = "no rank has finished a step" if step is None else f"the last step is {step}"
        return Answer(
            "ok", f"no rank waits beyond its deadline; {so_far}", _idle(run), caveats=run.caveats()
        )
    return Answer(
        level="alert",
        summary=_sentence(run, stall, records),
        data=_data(run, stall, records, last_step),
        lines=_lines(stall),
        caveats=[*run.caveats(), *_young(records)],
    )


def _last_steps(run: Run) -> dict[int, int]:
    """The last step that each rank has finished; of the newest start, where steps came again."""
    found = run.query("SELECT rank, max(step) AS step FROM current_steps GROUP BY rank")
    return dict(zip(found["rank"].to_pylist(), found["step"].to_pylist(), strict=True))


def _still_waiting(recorded: list[Ongoing], last_step: Mapping[int, int]) -> dict[int, Ongoing]:
    """Records of ranks that did not go on: neither they, nor by two steps anybody."""
    newest = max(last_step.values(), default=-1)

    def is_over(record: Ongoing) -> bool:
        if record.step is None:
            return False
        went_on = record.error is None and last_step.get(record.rank, -1) >= record.step
        return went_on or newest >= record.step + 2

    return {record.rank: record for record in recorded if not is_over(record)}


def _young(records: Mapping[int, Ongoing]) -> list[str]:
    age_s = time.time() - max(record.t_ns for record in records.values()) / 1e9
    if 0 <= age_s < _SETTLED_S:
        return [f"the newest record is {age_s:.1f} s old: other ranks may still be about to record"]
    return []


# ---------------------------------------------------------------- what is said


def _sentence(run: Run, stall: Stall, records: Mapping[int, Ongoing]) -> str:
    finding = stall.finding
    longest_s = max(record.waited_ns for record in records.values()) / 1e9
    wait = "waits" if len(records) == 1 else "wait"
    waits = (
        f"{len(records):,} of {run.mesh.world_size:,} ranks {wait}, for {seconds(longest_s)} when"
    )
    where = "" if finding.step is None else f"step {finding.step}: "
    if not finding.ranks:
        return (
            f"{where}all ranks came to {stall.meetings[0]} and it does not end; "
            f"{waits} they recorded: the transport, or a rank that only says it came"
        )
    reasons = set(finding.evidence["why"].values())
    reason = reasons.pop() if len(reasons) == 1 else "see why"
    at = sorted({host for rank, host in hosts(run).items() if rank in finding.ranks})
    place = f" on {at[0]}" if len(at) == 1 else f" on {len(at)} hosts" if at else ""
    covers = f", in one {finding.group} group" if len(finding.ranks) > 1 and finding.group else ""
    verb = "holds" if len(finding.ranks) == 1 else "hold"
    sure = "" if finding.certain else " perhaps"
    return (
        f"{where}{named(finding.ranks)}{place}{covers}{sure} {verb} the run up ({reason}); "
        f"{waits} they recorded"
    )


def _lines(stall: Stall) -> list[str]:
    guilty = set(stall.finding.ranks)
    told = sorted(stall.meetings, key=lambda m: guilty.isdisjoint(m.missing))
    rows = [["operation", "came", "of", "waiting", "missing"]]
    for meeting in told[:_SHOWN]:
        came = len(meeting.members) - len(meeting.missing)
        waiting, missing = ranks_text(meeting.waiting, 4), ranks_text(meeting.missing, 4)
        rows.append([str(meeting), str(came), str(len(meeting.members)), waiting, missing or "-"])
    more = len(told) - _SHOWN
    return table(rows) + ([f"and {counted(more, 'operation')} more"] if more > 0 else [])


# ---------------------------------------------------------------- for the 3D view


def _idle(run: Run) -> dict[str, Any]:
    return {**_layout(run), "suspects": [], "states": list(STATES), "state": [], "operations": []}


def _layout(run: Run) -> dict[str, Any]:
    mesh = run.mesh
    return {
        "world_size": mesh.world_size,
        "tensor": mesh.tensor,
        "data": mesh.data,
        "pipeline": mesh.pipeline,
    }


def _data(
    run: Run, stall: Stall, records: Mapping[int, Ongoing], last_step: Mapping[int, int]
) -> dict[str, Any]:
    """Arrays have a value a rank, `wait` of a waiting one is a place in `waits`."""
    finding, num_ranks = stall.finding, run.mesh.world_size
    waits: dict[tuple[Any, ...], int] = {}
    wait: list[int | None] = [None] * num_ranks
    seq: list[int | None] = [None] * num_ranks
    waited_ms: list[int | None] = [None] * num_ranks
    state = [STATES.index("silent")] * num_ranks
    for rank, record in records.items():
        kind = (record.name, record.op, record.phase, record.group)
        wait[rank] = waits.setdefault(kind, len(waits))
        seq[rank] = record.seq
        waited_ms[rank] = round(record.waited_ns / 1e6)
        state[rank] = STATES.index("waiting")
    return {
        **_layout(run),
        "step": finding.step,
        "suspects": list(finding.ranks),
        "why": finding.evidence["why"],
        "group": finding.group,
        "certain": finding.certain,
        "collective": finding.evidence["collective"],
        "states": list(STATES),
        "state": state,
        "waits": [dict(zip(("name", "op", "phase", "group"), kind, strict=True)) for kind in waits],
        "wait": wait,
        "seq": seq,
        "waited_ms": waited_ms,
        "last_step": [last_step.get(rank) for rank in range(num_ranks)],
        "errors": {str(rank): r.error for rank, r in records.items() if r.error},
        "operations": [meeting.as_json() for meeting in stall.meetings[:_MOST_MEETINGS]],
        "num_operations": len(stall.meetings),
    }
