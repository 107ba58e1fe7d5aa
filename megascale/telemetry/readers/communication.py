"""What collectives and transfers achieve, by group and operation, against the link's speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from megascale.errors import DataError
from megascale.telemetry.diagnose.transfers import Part, Rate, parts_of, rates
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import number_option
from megascale.telemetry.shown import counted, named, seconds, table
from megascale.telemetry.store.run import Run

DEFAULT_STEPS = 200
MOST_RANKS = 400
MOST_STEPS = 3
_SHOWN = 12


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, DEFAULT_STEPS)
    ranks = _ranks(run, window)
    steps = _sampled(run, first, last)
    steps = steps[-max(1, MOST_RANKS // max(1, len(ranks))) :]
    if not steps:
        raise DataError(
            f"no step from {first} to {last} has spans; ask for more steps "
            "(telemetry.span_interval says how often spans are recorded)"
        )
    parts: list[Part] = []
    for step in steps:
        spans = run.spans(step, step + 1, ranks=ranks)
        for _, own in groupby(spans, key=lambda span: span.rank):
            parts += parts_of([*own], run.mesh)
    mesh = run.mesh
    sizes = {"tensor": mesh.tensor, "data": mesh.data, "world": mesh.world_size}
    found = rates({(p.rank, p.kind, p.seq, p.launch_ns): p for p in parts}.values(), sizes)
    speed = _link_speed(run)
    slow = [(rate, *one) for rate in found for one in rate.slow]
    slow.sort(key=lambda one: -one[2])
    caveats = run.caveats()
    unsized = sorted({rate.kind[0] for rate in found if rate.num_bytes is None})
    if unsized:
        caveats.append(f"no bytes were recorded of {', '.join(unsized)}: only times are known")
    if len(ranks) < run.mesh.world_size:
        caveats.append(
            f"{counted(len(ranks), 'rank')} of {run.mesh.world_size} looked at; --ranks chooses"
        )
    return Answer(
        level="notice" if slow else "ok",
        summary=_sentence(found, slow, speed),
        data={
            "steps": steps,
            "link_bytes_per_s": speed,
            "operations": [_row(rate) for rate in found],
        },
        lines=_lines(found, speed),
        caveats=caveats,
    )


def _sampled(run: Run, first: int, last: int) -> list[int]:
    rows = run.query(
        "SELECT DISTINCT step FROM current_steps WHERE sampled AND step BETWEEN ? AND ? "
        f"ORDER BY step DESC LIMIT {MOST_STEPS}",
        (first, last),
    ).to_pylist()
    return sorted(row["step"] for row in rows)


def _ranks(run: Run, window: Window) -> list[int]:
    """Of a large run whole groups: a pipeline with its tensor groups, and as many data groups as
    fit, of stages evenly over the pipeline."""
    mesh = run.mesh
    if window.ranks is not None:
        return sorted({int(rank) for rank in window.ranks})
    most = number_option(window, "most_ranks", MOST_RANKS)
    if mesh.world_size <= most:
        return list(range(mesh.world_size))
    per_stage = mesh.tensor * mesh.data
    found = {t + stage * per_stage for t in range(mesh.tensor) for stage in range(mesh.pipeline)}
    number = min(mesh.pipeline, max(0, most - len(found)) // mesh.data)
    for stage in np.unique(np.linspace(0, mesh.pipeline - 1, number).astype(int)).tolist():
        found |= {stage * per_stage + d * mesh.tensor for d in range(mesh.data)}
    return sorted(found)


def _link_speed(run: Run) -> float | None:
    rows = run.query("SELECT max(speed_bytes_per_s) AS speed FROM counters").to_pylist()
    speed = rows[0]["speed"]
    return None if speed is None else float(speed)


def _row(rate: Rate) -> dict[str, object]:
    name, op, group = rate.kind
    return {
        "name": name,
        "op": op,
        "group": group,
        "number": rate.number,
        "num_bytes": rate.num_bytes,
        "time_s": round(rate.time_s, 9),
        "bytes_per_s": None if rate.bytes_per_s is None else round(rate.bytes_per_s, 1),
        "slow": [
            {"group": list(instance), "times": round(times, 3), "ranks": list(rate.ranks[instance])}
            for instance, times in rate.slow
        ],
    }


def _sentence(
    found: Sequence[Rate],
    slow: Sequence[tuple[Rate, tuple[int, ...], float]],
    speed: float | None,
) -> str:
    if not found:
        return "no operation of a group was recorded by two of its ranks"
    if slow:
        rate, instance, times = slow[0]
        ranks = rate.ranks[instance]
        name, op, group = rate.kind
        more = f"; {len(slow) - 1} more groups are slow" if len(slow) > 1 else ""
        return (
            f"{name} ({op}, {group}) of {named(ranks)} takes {times:.1f} times as long as in the "
            f"other groups{more}; ask network which port it is"
        )
    sized = [rate for rate in found if rate.bytes_per_s is not None]
    if not sized:
        return f"{len(found)} kinds of operations, no group of any is slower than the like"
    largest = max(sized, key=lambda rate: rate.num_bytes or 0)
    share = f", {100 * (largest.bytes_per_s or 0) / speed:.0f} % of the link" if speed else ""
    return (
        f"{largest.kind[0]} ({largest.kind[1]}) moves {(largest.bytes_per_s or 0) / 1e9:.1f} GB/s "
        f"a rank{share}; no group is slower than the like"
    )


def _lines(found: Sequence[Rate], speed: float | None) -> list[str]:
    rows = [["operation", "group", "number", "MB", "median", "GB/s", "of link"]]
    for rate in found[:_SHOWN]:
        size = "" if rate.num_bytes is None else f"{rate.num_bytes / 1e6:.1f}"
        fast = "" if rate.bytes_per_s is None else f"{rate.bytes_per_s / 1e9:.2f}"
        of = f"{100 * rate.bytes_per_s / speed:.0f} %" if rate.bytes_per_s and speed else ""
        name = f"{rate.kind[0]} {rate.kind[1]}"
        rows.append([name, rate.kind[2], str(rate.number), size, seconds(rate.time_s), fast, of])
    more = len(found) - _SHOWN
    return [*table(rows), *([f"and {more} more"] if more > 0 else [])]
