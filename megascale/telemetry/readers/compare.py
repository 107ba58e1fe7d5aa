"""Several runs beside each other: MFU over steps, and the hosts behind the difference (MegaScale
Figure 6). The other runs are named by the option `with`, folders joined by commas."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale.errors import DataError
from megascale.telemetry.diagnose.compare import Behind, host_ratios, hosts_behind
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import host_list, numbers, stages
from megascale.telemetry.shown import percent, seconds, table
from megascale.telemetry.store.run import Run, open_run

DEFAULT_STEPS = 1_000_000
COMPARED_STEPS = 200  # the newest, of which hosts are compared
SAME = 0.01  # MFU that differs by less is the same
MOST_POINTS = 500


@dataclass(frozen=True)
class Curve:
    """mfu_S, or steps a second where no MFU was logged."""

    name: str
    bounds: tuple[int, int]
    step_S: list[int]
    speed_S: list[float]
    is_mfu: bool
    step_s: float
    ratios: dict[str, float]

    @property
    def speed(self) -> float:
        return statistics.median(self.speed_S)


def ask(run: Run, window: Window) -> Answer:
    folders = [name for name in window.options.get("with", "").split(",") if name]
    if not folders:
        raise DataError(
            "compare needs other runs: `megascale diagnose RUN --compare RUN ...`, or option "
            "with=FOLDER,FOLDER"
        )
    with ExitStack() as stack:
        runs = [run, *(stack.enter_context(open_run(Path(name))) for name in folders)]
        curves = [_curve(one, window) for one in runs]
        caveats = [f"{one.run_dir.name}: {text}" for one in runs for text in one.caveats()]
    comparable = len({curve.is_mfu for curve in curves}) == 1
    if not comparable:
        curves = [_by_step_time(curve) for curve in curves]
        caveats.append("not every run logged its MFU: steps a second are compared")
    behind = hosts_behind([c.speed for c in curves], [c.ratios for c in curves])
    assert behind is not None, curves
    return Answer(
        level="notice" if behind.difference >= SAME else "ok",
        summary=_sentence(curves, behind),
        data={
            "runs": [_row(curve) for curve in curves],
            "faster": behind.faster,
            "slower": behind.slower,
            "difference_share": round(behind.difference, 5),
            "hosts": [host for host, _ in behind.hosts],
            "host_shares": numbers(share for _, share in behind.hosts),
        },
        lines=_lines(curves),
        caveats=caveats,
    )


def _curve(run: Run, window: Window) -> Curve:
    first, last = run.bounds(window, DEFAULT_STEPS)
    logged = [
        (int(m["step"]), float(m["mfu"]))
        for m in run.metrics()
        if m["current"] and "mfu" in m and first <= m["step"] <= last
    ]
    since = max(first, last - COMPARED_STEPS + 1)
    times = run.computed(since, last)
    step_S = np.arange(since, last + 1)
    step_s = float(np.nanmedian(run.mean_step_s(step_S)))
    with np.errstate(invalid="ignore"):
        compute_R = np.nanmedian(times.ns_SR["compute"], axis=0)
    rank_R = times.rank_R
    ratios = host_ratios(compute_R, stages(run, rank_R), host_list(run, rank_R))
    if logged:
        steps, speeds = [step for step, _ in logged], [mfu for _, mfu in logged]
    else:
        steps, speeds = [last], [1 / step_s]
    name = run.run_dir.name
    return Curve(name, (first, last), steps, speeds, bool(logged), step_s, ratios)


def _by_step_time(curve: Curve) -> Curve:
    steps, speed = [curve.bounds[1]], [1 / curve.step_s]
    return Curve(curve.name, curve.bounds, steps, speed, False, curve.step_s, curve.ratios)


def _row(curve: Curve) -> dict[str, object]:
    every = -(-len(curve.step_S) // MOST_POINTS)
    slow = {host: ratio for host, ratio in curve.ratios.items() if ratio > 1.02}
    return {
        "name": curve.name,
        "first_step": curve.bounds[0],
        "last_step": curve.bounds[1],
        "steps": curve.step_S[::every],
        "mfu" if curve.is_mfu else "steps_per_s": curve.speed_S[::every],
        "median": round(curve.speed, 6),
        "step_s": round(curve.step_s, 6),
        "num_hosts": len(curve.ratios),
        "slow_hosts": list(slow),
        "slow_host_shares": numbers(ratio - 1 for ratio in slow.values()),
    }


def _sentence(curves: Sequence[Curve], behind: Behind) -> str:
    slower, faster = curves[behind.slower], curves[behind.faster]
    if behind.difference < SAME:
        return f"{len(curves)} runs are equally fast, to {percent(behind.difference)}"
    what = (
        f"MFU {percent(slower.speed)} against {percent(faster.speed)}"
        if slower.is_mfu
        else f"{seconds(slower.step_s)} a step against {seconds(faster.step_s)}"
    )
    told = f"{slower.name} is {percent(behind.difference)} slower than {faster.name} ({what})"
    if not behind.hosts:
        return (
            f"{told}; no host computes slower in it than in the other: ask both for decomposition"
        )
    hosts = ", ".join(f"{host} by {percent(share)}" for host, share in behind.hosts[:4])
    more = f" and {len(behind.hosts) - 4} more" if len(behind.hosts) > 4 else ""
    return f"{told}; hosts that compute slower only there: {hosts}{more}"


def _lines(curves: Sequence[Curve]) -> list[str]:
    rows = [["run", "steps", "MFU", "step", "hosts", "slow hosts"]]
    for curve in curves:
        slow = sorted(host for host, ratio in curve.ratios.items() if ratio > 1.02)
        rows.append(
            [
                curve.name,
                f"{curve.bounds[0]}-{curve.bounds[1]}",
                percent(curve.speed) if curve.is_mfu else "",
                seconds(curve.step_s),
                str(len(curve.ratios)),
                ", ".join(slow[:3]) + (f" +{len(slow) - 3}" if len(slow) > 3 else ""),
            ]
        )
    return table(rows)
