"""What a step would take without the slow ranks, and with no rank slower than the median."""

from __future__ import annotations

import numpy as np

from megascale.telemetry.diagnose.what_if import what_if
from megascale.telemetry.readers import stragglers
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import stages
from megascale.telemetry.shown import counted, named, percent, seconds
from megascale.telemetry.store.run import Run

WORTH = 0.02  # of a step


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, stragglers.DEFAULT_STEPS)
    found = stragglers.find(run, first, last)
    times = run.step_times(first, last)
    _, of, own = np.intersect1d(times.step_S, found.step_S, return_indices=True)
    step_s_S = np.nanmax(times.dur_s_SR[of], axis=1)
    compute_s_SR = found.compute_ns_SR[own] / 1e9
    known_S = ~np.isnan(compute_s_SR).any(axis=1)
    step_s_S, compute_s_SR = step_s_S[known_S], compute_s_SR[known_S]
    caveats = run.caveats()
    if not known_S.all():
        left_out = counted(int((~known_S).sum()), "step")
        caveats.append(f"left out: {left_out} that not all ranks finished")
    stage_R = stages(run, found.rank_R)
    slow = window.ranks if window.ranks is not None else getattr(found.finding, "ranks", ())
    columns = [int(c) for c in np.flatnonzero(np.isin(found.rank_R, list(slow)))]
    without = what_if(step_s_S, compute_s_SR, stage_R, columns)
    usual = what_if(step_s_S, compute_s_SR, stage_R, None)
    if slow:
        sentence = (
            f"a step takes {seconds(without.step_s)}; with {named(list(slow))} as fast as the "
            f"peers it would take {seconds(without.without_s)} ({percent(without.saved)} less); "
            f"with no rank above the median of its stage {seconds(usual.without_s)} "
            f"({percent(usual.saved)} less)"
        )
    else:
        sentence = (
            f"a step takes {seconds(usual.step_s)} and no rank is lastingly slow; with no rank "
            f"above the median of its stage it would take {seconds(usual.without_s)} "
            f"({percent(usual.saved)} less)"
        )
    return Answer(
        level="notice" if slow and without.saved >= WORTH else "ok",
        summary=sentence,
        data={
            "first_step": first,
            "last_step": last,
            "num_steps": len(step_s_S),
            "ranks": [int(rank) for rank in slow],
            "step_s": round(without.step_s, 6),
            "without_slow_s": round(without.without_s, 6),
            "saved_share": round(without.saved, 5),
            "all_usual_s": round(usual.without_s, 6),
            "all_usual_saved_share": round(usual.saved, 5),
        },
        caveats=caveats,
    )
