"""What grew in the course of a run: which phase, since which step, and whose launches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megascale.telemetry.diagnose.drift import (
    LEAST_STEPS,
    Growth,
    Launches,
    buckets,
    growing,
    launch_offsets,
)
from megascale.telemetry.diagnose.straggler import COMPUTES, WAITS
from megascale.telemetry.diagnose.summary import COMPUTE, WAITING
from megascale.telemetry.readers.answer import Answer, Level, Window
from megascale.telemetry.readers.asking import host_list, numbers
from megascale.telemetry.readers.host_held import HostHeld, host_held
from megascale.telemetry.shown import counted, named, percent, table
from megascale.telemetry.store.run import Run

DEFAULT_STEPS = 30_000
EDGE_STEPS = 30  # at the begin and at the end, of which ranks are compared
COLLECTIVE = "grad_sync"  # the last one that ranks come to on their own
_SHOWN = 8


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, DEFAULT_STEPS)
    means = run.step_means(first, last)
    step_ms_S = run.mean_step_s(means.step_S) * 1e3
    ms_S = {name: values[:, 0] / 1e6 for name, values in means.ns_SR.items()}
    computed = [np.nan_to_num(ms_S[name]) for name in COMPUTES if name in ms_S]
    if computed:
        waits = [np.nan_to_num(ms_S[name]) for name in WAITS if name in ms_S]
        ms_S[COMPUTE] = np.sum(computed, axis=0) - np.sum([*waits, 0 * computed[0]], axis=0)
    grown = growing(means.step_S, ms_S, step_ms_S)
    whole = growing(means.step_S, {"step": step_ms_S}, step_ms_S)
    own = [one for one in grown if one.phase not in WAITING]
    launches = None
    if any(one.phase == COLLECTIVE for one in grown) and run.mesh.data > 1:
        launches = _launches(run, first, last, float(np.nanmedian(step_ms_S)))
    caveats = run.caveats()
    if len(means.step_S) < LEAST_STEPS:
        caveats.append(
            f"{counted(len(means.step_S), 'step')}: too few to see growth ({LEAST_STEPS})"
        )
    held = host_held(run, first, last)
    level: Level = "alert" if whole and grown else "notice" if grown or held else "ok"
    return Answer(
        level=level,
        summary=_sentence(run, grown, own, whole, launches, held, (first, last)),
        data=_data(means.step_S, ms_S, step_ms_S, grown, launches),
        lines=_lines(grown),
        caveats=caveats,
    )


def _launches(run: Run, first: int, last: int, step_ms: float) -> Launches | None:
    """Compares the first and the last steps of the window."""
    edge = min(EDGE_STEPS, max(1, (last - first + 1) // 3))
    waits = [
        run.phase_times(*steps, [COLLECTIVE])
        for steps in ((first, first + edge - 1), (last - edge + 1, last))
    ]
    if any(COLLECTIVE not in one.ns_SR for one in waits):
        return None
    common_R = np.intersect1d(waits[0].rank_R, waits[1].rank_R)
    before, after = (one.ns_SR[COLLECTIVE][:, np.isin(one.rank_R, common_R)] / 1e6 for one in waits)
    mesh = run.mesh
    group_R = common_R % mesh.tensor + mesh.tensor * (common_R // (mesh.tensor * mesh.data))
    found = launch_offsets(before, after, group_R, step_ms)
    ranks = tuple(int(common_R[at]) for at in found.ranks)
    return Launches(found.before_ms, found.after_ms, found.late_ms_R, ranks)


def _sentence(
    run: Run,
    grown: Sequence[Growth],
    own: Sequence[Growth],
    whole: Sequence[Growth],
    launches: Launches | None,
    held: HostHeld | None,
    steps: tuple[int, int],
) -> str:
    over = f"steps {steps[0]} to {steps[1]}"
    if held is not None:
        over = f"{over}; {held.told()}, so they follow what the host does"
    if not grown:
        return f"no phase grew ({over})"
    top = own[0] if own else grown[0]
    told = (
        f"{top.phase} grew from {top.before_ms:.1f} to {top.after_ms:.1f} ms since step "
        f"{top.since_step}"
    )
    if whole:
        told += f", a step by {percent(whole[0].share)}"
    if not own:
        told += "; nothing that ranks do themselves grew"
    if launches is not None and launches.after_ms > 1.5 * launches.before_ms:
        told += (
            f"; ranks of a data group launch {launches.after_ms:.1f} ms apart, at first "
            f"{launches.before_ms:.1f} ms"
        )
        if launches.ranks:
            host = host_list(run, np.array(launches.ranks[:1]))[0]
            at = f" on host {host}" if len(launches.ranks) == 1 else ""
            told += f": {named(launches.ranks)}{at} later than the others"
        else:
            told += ", others in every step (as after garbage collections)"
    return f"{told} ({over})"


def _data(
    step_S: np.ndarray[tuple[int], np.dtype[np.int64]],
    ms_S: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]],
    step_ms_S: np.ndarray[tuple[int], np.dtype[np.float64]],
    grown: Sequence[Growth],
    launches: Launches | None,
) -> dict[str, object]:
    first_B, whole_B = buckets(step_S, step_ms_S)
    series = {name: numbers(buckets(step_S, np.nan_to_num(v))[1]) for name, v in ms_S.items()}
    return {
        "steps": first_B.tolist(),
        "step_ms": numbers(whole_B),
        "phase_ms": series,
        "grown": [{**vars(one), "waits": one.phase in WAITING} for one in grown],
        "launch_offset_before_ms": None if launches is None else round(launches.before_ms, 4),
        "launch_offset_after_ms": None if launches is None else round(launches.after_ms, 4),
        "late_ranks": [] if launches is None else list(launches.ranks),
    }


def _lines(grown: Sequence[Growth]) -> list[str]:
    if not grown:
        return []
    rows = [["phase", "before ms", "after ms", "of a step", "since step", ""]]
    for one in grown[:_SHOWN]:
        note = "waits for others" if one.phase in WAITING else ""
        before, after = f"{one.before_ms:.2f}", f"{one.after_ms:.2f}"
        rows.append([one.phase, before, after, percent(one.of_step), str(one.since_step), note])
    return table(rows)
