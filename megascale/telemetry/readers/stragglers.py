"""Ranks that compute slower than their peers: the driver's own detector, over a run's windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.diagnose import straggler
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.straggler import CONFIRM, HORIZONS, WINDOW_STEPS, stragglers
from megascale.telemetry.diagnose.summary import hosts_of
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import hosts, number_option, numbers, stages
from megascale.telemetry.shown import counted, named, percent, table
from megascale.telemetry.store.run import Run

DEFAULT_STEPS = WINDOW_STEPS * HORIZONS[-1]
LEAST_WINDOW = 5  # steps
_SHOWN = 16


@dataclass(frozen=True)
class Found:
    """The detector's finding over the whole windows of some steps."""

    finding: Finding | None
    windows: list[straggler.Window]
    window_steps: int
    rank_R: NDArray[np.int64]
    step_S: NDArray[np.int64]
    compute_ns_SR: NDArray[np.float64]


def find(run: Run, first: int, last: int, window_steps: int | None = None) -> Found:
    """Windows end at `last`. Of few steps the windows are shorter, down to LEAST_WINDOW."""
    times = run.computed(first, last)
    compute_SR = times.ns_SR["compute"]
    num_steps = len(times.step_S)
    if window_steps is None:
        window_steps = min(WINDOW_STEPS, max(LEAST_WINDOW, num_steps // CONFIRM))
    stage_R = stages(run, times.rank_R)
    begin = num_steps % window_steps
    windows = [
        straggler.window(
            compute_SR[at : at + window_steps], stage_R, int(times.step_S[at + window_steps - 1])
        )
        for at in range(begin, num_steps - window_steps + 1, window_steps)
    ]
    found = stragglers(windows, stage_R, window_steps=window_steps)
    if found is not None:  # from places in the arrays to ranks
        found = _by_rank(found, times.rank_R)
    return Found(found, windows, window_steps, times.rank_R, times.step_S, compute_SR)


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, DEFAULT_STEPS)
    given = number_option(window, "window", 0, least=LEAST_WINDOW)
    found = find(run, first, last, given or None)
    caveats = run.caveats()
    if len(found.windows) < CONFIRM:
        caveats.append(
            f"{counted(len(found.step_S), 'step')} make {counted(len(found.windows), 'window')} of "
            f"{found.window_steps}; {CONFIRM} are needed to call a rank slow"
        )
    elif found.window_steps < WINDOW_STEPS:
        caveats.append(
            f"windows of {counted(found.window_steps, 'step')} instead of {WINDOW_STEPS}: only "
            "coarse slowness is found"
        )
    return Answer(
        level="ok" if found.finding is None else "alert",
        summary=_sentence(run, found, first, last),
        data=_data(found, first, last),
        lines=_lines(run, found),
        caveats=caveats,
    )


def _by_rank(finding: Finding, rank_R: NDArray[np.int64]) -> Finding:
    evidence = {
        key: {str(int(rank_R[int(at)])): value for at, value in of.items()}
        if isinstance(of, dict)
        else of
        for key, of in finding.evidence.items()
    }
    ranks = tuple(int(rank_R[at]) for at in finding.ranks)
    return Finding(finding.kind, ranks, evidence, finding.step)


def _sentence(run: Run, found: Found, first: int, last: int) -> str:
    if found.finding is None:
        over = f"steps {first} to {last}, {counted(len(found.windows), 'window')}"
        return f"no rank computes slower than the peers of its stage ({over})"
    guilty, evidence = found.finding.ranks, found.finding.evidence
    whole = hosts_of(guilty, hosts(run))
    shares = [evidence["share"][str(rank)] for rank in guilty]
    worst = guilty[int(np.argmax(shares))]
    of_hosts = f", all ranks of host {', '.join(whole[:4])}" if whole else ""
    at = "" if whole else f" on host {hosts(run).get(worst, '?')}"
    much = percent(shares[0]) if len(guilty) == 1 else f"up to {percent(max(shares))}"
    peers = evidence["peers"][str(worst)]
    number = evidence["windows"][str(worst)]
    verb = "computes" if len(guilty) == 1 else "compute"
    return (
        f"{named(guilty)}{at}{of_hosts} {verb} {much} slower than the "
        f"{counted(peers, 'peer')} of the stage, over the last {counted(number, 'window')} of "
        f"{counted(found.window_steps, 'step')} (up to step {found.finding.step})"
    )


def _data(found: Found, first: int, last: int) -> dict[str, object]:
    finding = found.finding
    guilty = finding.ranks if finding is not None else ()
    columns = np.searchsorted(found.rank_R, guilty)
    return {
        "first_step": first,
        "last_step": last,
        "window_steps": found.window_steps,
        "window_last_steps": [one.step for one in found.windows],
        "ranks": list(guilty),
        "share": [finding.evidence["share"][str(r)] for r in guilty] if finding else [],
        "limit": [finding.evidence["limit"][str(r)] for r in guilty] if finding else [],
        "ratios": [numbers(one.ratio_R[column] for one in found.windows) for column in columns],
    }


def _lines(run: Run, found: Found) -> list[str]:
    if found.finding is None:
        return []
    evidence, of = found.finding.evidence, hosts(run)
    rows = [["rank", "host", "stage", "slower", "limit", "windows"]]
    stage_R = stages(run, np.array(found.finding.ranks, np.int64))
    for rank, stage in list(zip(found.finding.ranks, stage_R.tolist(), strict=True))[:_SHOWN]:
        key = str(rank)
        share, limit = percent(evidence["share"][key]), percent(evidence["limit"][key])
        rows.append(
            [key, of.get(rank, ""), str(stage), share, limit, str(evidence["windows"][key])]
        )
    return table(rows)
