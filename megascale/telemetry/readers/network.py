"""Did ports reach their link's speed, were they congested, which one is behind its peers: from what
`megascale monitor` sampled by the millisecond, joined with the communication of the ranks there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megascale.telemetry.diagnose.port_use import (
    FULL_SHARE,
    PortSamples,
    PortUse,
    moved_between,
    port_uses,
)
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import hosts, number_option
from megascale.telemetry.shown import counted, percent, seconds, table
from megascale.telemetry.store.run import Run

DEFAULT_SECONDS = 60
_COMMUNICATION = ("grad_sync", "param_gather", "pp_wait", "world_sums", "norm_sum")
_MOST_DRAWN = 64  # ports in the data, the worst first
_MOST_POINTS = 2000  # of each
_MOST_BURSTS = 200
_SHOWN = 16
_GB = 1e9


def ask(run: Run, window: Window) -> Answer:
    """Of the newest `seconds` (60) that were sampled, or of the window's steps."""
    span = _time_of(run, window)
    ports = [] if span is None else samples(run, *span)
    uses = port_uses(ports)
    if not uses:
        return Answer(
            "ok",
            f"no port was sampled; megascale monitor {run.run_dir} does it, on each node or "
            "--everywhere",
            {"ports": []},
            caveats=run.caveats(),
        )
    guilty = [use for use in uses if use.is_congested or use.is_behind]
    drawn = sorted(range(len(uses)), key=lambda at: _worst_first(uses[at]))[:_MOST_DRAWN]
    known = [port for port in ports if len(port.t_s_T) > 1]
    communication = _communication(run, [known[at] for at in drawn])
    return Answer(
        level="alert" if guilty else "ok",
        summary=_sentence(uses, guilty),
        data={
            "num_ports": len(uses),
            "ports": [_port(uses[at], known[at]) for at in sorted(drawn)],
            "congested": [_name(use) for use in uses if use.is_congested],
            "behind": [_name(use) for use in uses if use.is_behind],
            "communication": communication,
        },
        lines=[*_lines(uses), *_communication_lines(communication)],
        caveats=[*run.caveats(), *_sampling(run)],
    )


# ---------------------------------------------------------------- what is in the store


def _time_of(run: Run, window: Window) -> tuple[int, int] | None:
    """Wall-clock ns; None where nothing was sampled."""
    if window.first_step is not None or window.last_step is not None:
        first, last = run.bounds(window, 1)
        times = run.step_times(first, last)
        end = times.begin_unix_s_SR + times.dur_s_SR
        return int(np.nanmin(times.begin_unix_s_SR) * 1e9), int(np.nanmax(end) * 1e9)
    newest = run.query("SELECT max(t_ns) AS newest FROM counters")["newest"][0].as_py()
    if newest is None:
        return None
    length_s = number_option(window, "seconds", DEFAULT_SECONDS)
    return newest - length_s * 1_000_000_000, newest


def samples(run: Run, from_unix_ns: int, to_unix_ns: int) -> list[PortSamples]:
    """By host and port; times in s since the beginning of the span."""
    found = run.query(
        "SELECT host, port, t_ns - ? AS since_ns, sent_bytes, received_bytes, "
        "speed_bytes_per_s, congestion FROM counters WHERE t_ns BETWEEN ? AND ? "
        "ORDER BY host, port, t_ns",
        (from_unix_ns, from_unix_ns, to_unix_ns),
    )
    if not found.num_rows:
        return []
    host, port = found["host"].to_numpy(), found["port"].to_numpy()
    names = ("since_ns", "sent_bytes", "received_bytes", "speed_bytes_per_s", "congestion")
    columns = [np.asarray(found[name].to_numpy(), np.float64) for name in names]
    breaks = np.flatnonzero((host[1:] != host[:-1]) | (port[1:] != port[:-1])) + 1
    out = []
    for part in np.split(np.arange(found.num_rows), breaks):
        since, sent, received, speed, marks = (column[part] for column in columns)
        first = part[0]
        known = speed[~np.isnan(speed)]
        fastest = float(known[-1]) if len(known) else None
        out.append(
            PortSamples(host[first], port[first], since / 1e9, sent, received, marks, fastest)
        )
    return out


def _sampling(run: Run) -> list[str]:
    """How well the grid of times was kept, where that is not well."""
    found = []
    for _, incident in run.incidents():
        detail = incident.detail
        if incident.name == "monitor" and detail.get("p99_ms", 0) > 3 * detail["asked_ms"]:
            found.append(
                f"samples of {detail['host']} came {detail['p99_ms']} ms apart at worst (99 of "
                f"100), {detail['asked_ms']} ms were asked: shorter bursts are not seen"
            )
    return found[-_SHOWN:]


def _communication(run: Run, ports: Sequence[PortSamples]) -> list[dict[str, Any]]:
    """What each host's ports moved while its first rank communicated, by phase."""
    if not ports or run.starts[-1].steps is None:
        return []
    first_rank: dict[str, int] = {}
    for rank, host in sorted(hosts(run).items()):
        first_rank.setdefault(host, rank)
    newest = run.query("SELECT max(t_ns) AS newest FROM counters")["newest"][0].as_py()
    found = []
    for host in sorted({port.host for port in ports} & first_rank.keys()):
        own = [port for port in ports if port.host == host]
        found += _of_host(run, host, first_rank[host], own, newest)
    return found


def _of_host(
    run: Run, host: str, rank: int, own: Sequence[PortSamples], newest_ns: int
) -> list[dict[str, Any]]:
    last_s = max(float(port.t_s_T[-1]) for port in own)
    origin_ns = newest_ns - round(last_s * 1e9)
    spans = run.query(
        "SELECT name, t0_ns, dur_ns FROM current_spans WHERE rank = ? AND t0_ns BETWEEN ? AND ? "
        f"AND name IN ({', '.join(repr(name) for name in _COMMUNICATION)}) ORDER BY name, t0_ns",
        (rank, origin_ns, newest_ns),
    )
    names = spans["name"].to_numpy()
    begin_s = (spans["t0_ns"].to_numpy() - origin_ns) / 1e9
    end_s = begin_s + spans["dur_ns"].to_numpy() / 1e9
    speeds = [port.speed_bytes_per_s for port in own]
    speed = None if None in speeds else sum(one for one in speeds if one is not None)
    found = []
    for name in dict.fromkeys(names.tolist()):
        of = names == name
        time_s = float((end_s[of] - begin_s[of]).sum())
        num_bytes = sum(moved_between(port, begin_s[of], end_s[of]) for port in own)
        if time_s > 0:
            rate = num_bytes / time_s
            share = rate / speed if speed else None
            found.append(
                {
                    "host": host,
                    "rank": rank,
                    "phase": name,
                    "time_s": round(time_s, 6),
                    "gb_per_s": round(rate / _GB, 4),
                    "share_of_links": None if share is None else round(share, 4),
                }
            )
    return found


# ---------------------------------------------------------------- what is said


def _worst_first(use: PortUse) -> tuple[bool, bool, float]:
    return not use.is_congested, not use.is_behind, -use.num_bytes


def _name(use: PortUse) -> str:
    return f"{use.host} {use.port}"


def _sentence(uses: Sequence[PortUse], guilty: Sequence[PortUse]) -> str:
    over = f"{counted(len(uses), 'port')}, {seconds(max(use.seconds for use in uses))}"
    if guilty:
        worst = min(guilty, key=lambda use: (not use.is_congested, use.of_peers or 1.0))
        what = []
        if worst.is_congested:
            what.append(
                f"was congested in {percent(worst.congested_share)} of its busy time "
                f"({worst.marks or 0:.0f} marks)"
            )
        if worst.reached is not None:
            what.append(f"reached {percent(worst.reached)} of its link")
        if worst.of_peers is not None and worst.is_behind:
            what.append(f"moved its bytes at {percent(worst.of_peers)} of its peers' rate")
        more = f"; {len(guilty) - 1} more like it" if len(guilty) > 1 else ""
        return f"{_name(worst)} {', '.join(what)}{more} ({over})"
    busy = [use for use in uses if use.busy_s]
    if not busy:
        return f"no port moved anything ({over})"
    best = max(busy, key=lambda use: (use.reached or 0.0, use.peak))
    if best.reached is None:
        return (
            f"no port is congested or behind; {_name(best)} moved up to {best.peak / _GB:.2f} "
            f"GB/s, its link's speed is not known ({over})"
        )
    return (
        f"no port is congested or behind; {_name(best)} reached {percent(best.reached)} of its "
        f"link, and {percent(FULL_SHARE, 0)} of it in {percent(best.full_share or 0.0)} of its "
        f"busy time ({over})"
    )


def _port(use: PortUse, port: PortSamples) -> dict[str, Any]:
    """Rates of at most _MOST_POINTS moments: between every so many samples."""
    every = -(-len(port.t_s_T) // _MOST_POINTS)
    t_T, moved_T = port.t_s_T[::every], port.moved_T[::every]
    rate_T = np.maximum(np.diff(moved_T), 0) / np.maximum(np.diff(t_T), 1e-9)
    return {
        "host": use.host,
        "port": use.port,
        "seconds": round(use.seconds, 6),
        "busy_s": round(use.busy_s, 6),
        "num_bytes": use.num_bytes,
        "rate_gb_per_s": round(use.rate / _GB, 4),
        "peak_gb_per_s": round(use.peak / _GB, 4),
        "speed_gb_per_s": _or_none(port.speed_bytes_per_s, 1 / _GB),
        "reached": _or_none(use.reached),
        "full_share": _or_none(use.full_share),
        "marks": use.marks,
        "congested_share": round(use.congested_share, 4),
        "renewed_ms": use.renewed_ms,
        "of_peers": _or_none(use.of_peers),
        "t_ms": np.round(1e3 * t_T[1:], 3).tolist(),
        "gb_per_s": np.round(rate_T / _GB, 4).tolist(),
        "bursts": [
            {
                "begin_ms": round(1e3 * burst.begin_s, 3),
                "end_ms": round(1e3 * burst.end_s, 3),
                "num_bytes": burst.num_bytes,
                "gb_per_s": round(burst.rate / _GB, 4),
                "share": _or_none(burst.share),
                "marks": burst.marks,
            }
            for burst in use.bursts[-_MOST_BURSTS:]
        ],
    }


def _or_none(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(value * factor, 4)


def _lines(uses: Sequence[PortUse]) -> list[str]:
    rows = [["port", "busy", "GB/s", "peak", "of link", "full", "marks", "congested", "of peers"]]
    rows += [
        [
            _name(use),
            seconds(use.busy_s),
            f"{use.rate / _GB:.2f}",
            f"{use.peak / _GB:.2f}",
            *("-" if v is None else percent(v) for v in (use.reached, use.full_share)),
            "-" if use.marks is None else f"{use.marks:.0f}",
            percent(use.congested_share),
            "-" if use.of_peers is None else percent(use.of_peers),
        ]
        for use in sorted(uses, key=_worst_first)[:_SHOWN]
    ]
    more = len(uses) - _SHOWN
    return table(rows) + ([f"and {counted(more, 'port')} more"] if more > 0 else [])


def _communication_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    rows = [["while its first rank was in", "host", "time", "GB/s", "of its links"]]
    for one in found[:_SHOWN]:
        share = one["share_of_links"]
        of_links = "-" if share is None else percent(share)
        rate = f"{one['gb_per_s']:.2f}"
        rows.append([one["phase"], one["host"], seconds(one["time_s"]), rate, of_links])
    return table(rows)
