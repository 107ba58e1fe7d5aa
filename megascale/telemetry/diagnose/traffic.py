"""Network traffic that stops, falls or fluctuates (MegaScale 4.2).

Steps are alike, so the bytes that a port moves in a step are too. A port is compared with its own
past, and that with the other ports: where all change alike the job has changed, not the network.
Traffic that ceases is certain at once; a fall or a fluctuation is an alert, certain after CONFIRM
steps in a row.

Suffixes: S steps, P ports, T times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.robust import Floats, deviation, median

BASELINE_STEPS = 20
CONFIRM = 3
FALL = 0.2  # of the usual bytes a step
FLUCTUATION = 0.15  # robust deviation over RECENT_STEPS, of the usual bytes a step
RECENT_STEPS = 10
QUIETER = 3.0  # times the longest silence so far
QUIET_S = 3.0  # at least


@dataclass(frozen=True)
class Port:
    """A network interface or RDMA port of a node, and the global ranks of that node."""

    node: str
    name: str
    ranks: tuple[int, ...] = ()


def bytes_per_step(steps_T: Sequence[int], counter_T: Sequence[int]) -> dict[int, float]:
    """Bytes that a counter grew by in each step, from samples in order: `counter_T` was read while
    the last finished step was `steps_T`. Steps between two samples share what lies between. A
    counter that falls was reset: what lies there is not known and left out."""
    found: dict[int, float] = {}
    last_step, last_counter = None, 0
    for step, counter in zip(steps_T, counter_T, strict=True):
        if last_step is not None and counter < last_counter:
            last_step = None
        if last_step is None:
            last_step, last_counter = step, counter
        elif step > last_step:
            share = (counter - last_counter) / (step - last_step)
            found |= dict.fromkeys(range(last_step + 1, step + 1), share)
            last_step, last_counter = step, counter
    return found


def stopped(times_T: Floats, counters_TP: Floats, ports: Sequence[Port]) -> Finding | None:
    """Ports that moved bytes and do not any more, for much longer than they ever paused.

    times_T      seconds, rising, the last is now
    counters_TP  bytes since boot at those times

    A port is named where others moved bytes for so long after it; its node's ranks are the
    finding's. Where all fell silent nobody stands out and there are no ranks: the job stands still
    (`hang.localise`).
    """
    if len(times_T) < 3:
        return None
    moved_TP = np.diff(counters_TP, axis=0) != 0
    last_s, limit_s = {}, {}
    for port in np.flatnonzero(moved_TP.any(axis=0)).tolist():
        moments = times_T[1:][moved_TP[:, port]]
        pauses = np.diff(np.concatenate([times_T[:1], moments]))
        last_s[port] = float(moments[-1])
        limit_s[port] = max(QUIET_S, QUIETER * float(pauses.max()))
    if not last_s:
        return None  # no port was ever used
    now_s, moving_s = float(times_T[-1]), max(last_s.values())
    everybody = len(last_s) > 1 and now_s - moving_s > max(limit_s.values())
    until_s = now_s if len(last_s) == 1 else moving_s
    silent = [port for port in last_s if everybody or until_s - last_s[port] > limit_s[port]]
    if not silent:
        return None
    single = [port for port in silent if until_s - last_s[port] > limit_s[port]]
    return Finding(
        kind="traffic_stopped",
        ranks=_ranks([ports[port] for port in single]),
        evidence={
            "quiet_s": {_name(ports[port]): round(now_s - last_s[port], 3) for port in silent},
            "ports": len(last_s),
        },
        group=None if single else "world",
    )


def usual_bytes(bytes_SP: Floats) -> Floats:
    """[P]: what each port moves in a step, by the steps before the newest CONFIRM."""
    return np.asarray(median(bytes_SP[-BASELINE_STEPS - CONFIRM : -CONFIRM], axis=0)[0])


def changed(
    bytes_SP: Floats, ports: Sequence[Port], step: int, usual_P: Floats | None = None
) -> list[Finding]:
    """Ports whose bytes a step fell, or fluctuate: the newest step is the last row.

    bytes_SP  bytes that each port moved in each step; NaN where it is not known
    step      of the last row
    usual_P   of before a change that goes on, or else it becomes the usual after BASELINE_STEPS
    """
    if len(bytes_SP) < BASELINE_STEPS + CONFIRM:
        return []
    usual_P = usual_bytes(bytes_SP) if usual_P is None else usual_P
    used = np.flatnonzero(usual_P > 0)
    if not len(used):
        return []
    relative_SP = bytes_SP[:, used] / usual_P[used]
    if len(used) > 2:
        job_S = median(relative_SP, axis=1)
        relative_SP = relative_SP / np.where(job_S > 0, job_S, 1.0)
    low_SP = relative_SP[-CONFIRM:] < 1 - FALL
    fallen = np.flatnonzero(low_SP[-1])
    found = []
    for certain in (True, False):
        which = [p for p in fallen if bool(low_SP[:, p].all()) is certain]
        share = {_name(ports[used[p]]): round(float(relative_SP[-1, p]), 4) for p in which}
        if which:
            found.append(
                _alert("traffic_fell", share, [ports[used[p]] for p in which], certain, step)
            )
    found += _fluctuations(relative_SP, [ports[p] for p in used], set(fallen.tolist()), step)
    return found


def _fluctuations(
    relative_SP: Floats, ports: Sequence[Port], fallen: set[int], step: int
) -> list[Finding]:
    """Certain where it was so CONFIRM steps ago already."""
    now_P = deviation(relative_SP[-RECENT_STEPS:], axis=0)[0]
    before_P = deviation(relative_SP[-RECENT_STEPS - CONFIRM : -CONFIRM], axis=0)[0]
    which = [p for p in np.flatnonzero(now_P > FLUCTUATION).tolist() if p not in fallen]
    found = []
    for certain in (True, False):
        those = [p for p in which if bool(before_P[p] > FLUCTUATION) is certain]
        spread = {_name(ports[p]): round(float(now_P[p]), 4) for p in those}
        if those:
            found.append(
                _alert("traffic_fluctuates", spread, [ports[p] for p in those], certain, step)
            )
    return found


def _alert(
    kind: str, values: Mapping[str, float], ports: Sequence[Port], certain: bool, step: int
) -> Finding:
    return Finding(kind, _ranks(ports), {"relative": dict(values)}, step, None, certain)


def _name(port: Port) -> str:
    return f"{port.node}/{port.name}"


def _ranks(ports: Sequence[Port]) -> tuple[int, ...]:
    return tuple(sorted({rank for port in ports for rank in port.ranks}))
