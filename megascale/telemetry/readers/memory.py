"""Memory: its peak over time, allocations that were tried again, and failures.

The rank that writes metrics says its own memory with every line; every rank says its peak every
`telemetry.memory_interval` steps and when it ends (incident "resources"), and that it ran out (any
incident named "...memory").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megascale.events import Incident
from megascale.telemetry.diagnose.memory_growth import Growing, growing_memory
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import hosts
from megascale.telemetry.shown import counted, named, percent, table
from megascale.telemetry.store.run import Run
from megascale.units import format_bytes

DEFAULT_STEPS = 1_000_000
FULL = 0.95  # of the device: the allocator has no room to keep blocks
_SHOWN = 12


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, DEFAULT_STEPS)
    lines = [
        m
        for m in run.metrics()
        if m["current"] and first <= m["step"] <= last and "memory_bytes" in m
    ]
    incidents = run.incidents()
    out = [i for _, i in incidents if i.name.endswith("memory")]
    newest_start = max((start for start, _ in incidents), default=0)
    said = [i for start, i in incidents if i.name == "resources" and start == newest_start]
    newest = {i.rank: i.detail for i in said}
    growing = _growing(said)
    retries = {r: int(d.get("num_alloc_retries") or 0) for r, d in newest.items()}
    retries = {r: n for r, n in retries.items() if n}
    full = {
        r: d["memory_fraction"] for r, d in newest.items() if d.get("memory_fraction", 0) >= FULL
    }
    logged = max((int(m.get("num_alloc_retries") or 0) for m in lines), default=0)
    fraction = max((float(m.get("memory_fraction") or 0) for m in lines), default=0.0)
    pressed = bool(retries or logged or full or growing or fraction >= FULL)
    return Answer(
        level="alert" if out else "notice" if pressed else "ok",
        summary=_sentence(run, lines, out, retries, full, logged, growing),
        data={
            "first_step": first,
            "last_step": last,
            "steps": [m["step"] for m in lines],
            "memory_bytes": [m["memory_bytes"] for m in lines],
            "memory_fraction": [m.get("memory_fraction") for m in lines],
            "num_alloc_retries": [m.get("num_alloc_retries") for m in lines],
            "ranks": sorted(newest),
            "rank_memory_bytes": [newest[r].get("memory_bytes") for r in sorted(newest)],
            "rank_alloc_retries": [newest[r].get("num_alloc_retries") for r in sorted(newest)],
            "growing": [vars(one) for one in growing],
            "out_of_memory": [
                {"rank": i.rank, "step": i.step, "name": i.name, "detail": dict(i.detail)}
                for i in out
            ],
        },
        lines=_lines(newest, hosts(run)),
        caveats=run.caveats() + _unknown(lines, newest),
    )


def _growing(said: Sequence[Incident]) -> list[Growing]:
    seen: dict[int, list[tuple[int, int]]] = {}
    limit_bytes: dict[int, float] = {}
    for one in said:
        size, share = one.detail.get("memory_bytes"), one.detail.get("memory_fraction")
        if one.step is None or not size:
            continue
        seen.setdefault(one.rank, []).append((one.step, int(size)))
        if share:
            limit_bytes[one.rank] = size / share
    return growing_memory(seen, limit_bytes)


def _grows(run: Run, growing: Sequence[Growing]) -> str:
    top = growing[0]
    told = (
        f"memory of {named(sorted(one.rank for one in growing))} grows by up to "
        f"{format_bytes(top.bytes_a_step)} a step (rank {top.rank} on host "
        f"{hosts(run).get(top.rank, '?')}: {format_bytes(top.now_bytes)} now)"
    )
    full = min((one.full_at_step for one in growing if one.full_at_step), default=None)
    return told if full is None else f"{told}; full at step {full}"


def _unknown(lines: Sequence[dict[str, Any]], newest: dict[int, Any]) -> list[str]:
    found = []
    if not lines:
        found.append("metrics.jsonl says nothing of memory")
    if not newest:
        found.append("ranks say their peak when they end: only the writing rank's is known yet")
    return found


def _sentence(
    run: Run,
    lines: Sequence[dict[str, Any]],
    out: Sequence[Incident],
    retries: dict[int, int],
    full: dict[int, float],
    logged: int,
    growing: Sequence[Growing],
) -> str:
    told = []
    if out:
        ranks = sorted({one.rank for one in out})
        told.append(f"{named(ranks)} ran out of memory, last at step {out[-1].step}")
    if retries:
        on = sorted({hosts(run).get(rank, "?") for rank in retries})
        told.append(
            f"{named(sorted(retries))} (host {', '.join(on[:4])}) had allocations tried again, up "
            f"to {counted(max(retries.values()), 'time')}"
        )
    elif logged:
        told.append(f"the writing rank had allocations tried again {counted(logged, 'time')}")
    if growing:
        told.append(_grows(run, growing))
    if full:
        told.append(
            f"{named(sorted(full))} filled up to {percent(max(full.values()))} of the device"
        )
    if not told and lines:
        peak = max(lines, key=lambda m: m["memory_bytes"])
        share = peak.get("memory_fraction")
        of = f" ({percent(share)} of the device)" if share else ""
        told.append(
            f"memory peaked at {format_bytes(peak['memory_bytes'])}{of}, no allocation failed"
        )
    return "; ".join(told) or "nothing is known of memory"


def _lines(newest: dict[int, Any], host_of: dict[int, str]) -> list[str]:
    if not newest:
        return []
    rows = [["rank", "host", "peak", "of device", "retries", "failures"]]
    most = sorted(newest, key=lambda r: -float(newest[r].get("memory_bytes") or 0))[:_SHOWN]
    for rank in most:
        own = newest[rank]
        share = own.get("memory_fraction")
        rows.append(
            [
                str(rank),
                host_of.get(rank, ""),
                format_bytes(own.get("memory_bytes") or 0),
                "" if share is None else percent(share),
                str(own.get("num_alloc_retries", "")),
                str(own.get("num_ooms", "")),
            ]
        )
    return table(rows)
