"""What a port did by the millisecond: did it reach its link's speed, how long, was it congested.

Counters of bytes, sampled every few ms, are a rate between samples. Traffic of training comes in
bursts; means over a second hide both how fast a burst was and what slowed it. So bursts are cut out
where the rate rises over a hundredth of the link, and each has its bytes, its rate against the
link, and the marks of congestion that grew in it. Ports of one kind do the same work in training:
one that moves its bytes much slower than the others is behind its peers.

A driver may renew its counters more rarely than they are read; `renewed_ms` is how often they
changed while bytes moved, and nothing shorter than that is known.

Suffixes: T samples, B bursts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

IDLE_SHARE = 0.01  # of the link, or of the highest rate where the link is not known
FULL_SHARE = 0.8  # of the link: its speed, less what protocols take
WINDOW_S = 0.01  # rates are of at least so long
JOIN_S = 0.005  # a shorter pause does not end a burst
BEHIND = 0.7  # of the median of the port's peers
FEWEST_PEERS = 3


@dataclass(frozen=True)
class PortSamples:
    """One port's counters at times in s, rising; marks NaN where they were not read."""

    host: str
    port: str
    t_s_T: Floats
    sent_T: Floats
    received_T: Floats
    marks_T: Floats
    speed_bytes_per_s: float | None

    @property
    def moved_T(self) -> Floats:
        """Bytes in the busier direction."""
        sent, received = np.ptp(self.sent_T), np.ptp(self.received_T)
        return self.sent_T if sent >= received else self.received_T


@dataclass(frozen=True)
class Burst:
    """begin_s, end_s on the samples' clock; share is of the link, None: its speed is not known."""

    begin_s: float
    end_s: float
    num_bytes: float
    rate: float
    share: float | None
    marks: float


@dataclass(frozen=True)
class PortUse:
    """What one port did.

    reached          highest rate over WINDOW_S, of the link
    full_share       of the busy time: at FULL_SHARE of the link or more
    marks            that grew, in all
    congested_share  of the busy time: in bursts in which marks grew
    of_peers         rate while busy, of the median of the ports like it; None: too few
    """

    host: str
    port: str
    seconds: float
    busy_s: float
    num_bytes: float
    rate: float  # while busy
    peak: float
    reached: float | None
    full_share: float | None
    marks: float | None
    congested_share: float
    renewed_ms: float | None
    of_peers: float | None
    bursts: tuple[Burst, ...]

    @property
    def is_behind(self) -> bool:
        return self.of_peers is not None and self.of_peers < BEHIND

    @property
    def is_congested(self) -> bool:
        """Marks grew while it moved bytes and did not move them at the link's speed."""
        slow = self.reached is None or self.full_share is None or self.full_share < 0.5
        return self.congested_share > 0.1 and slow


def port_uses(ports: Sequence[PortSamples]) -> list[PortUse]:
    """Each port's use, in order; ports with fewer than two samples are left out."""
    found = [_use(port) for port in ports if len(port.t_s_T) > 1]
    return _among_peers(found)


def kind_of(port: str) -> str:
    """Ports of one kind do the same work: "mlx5_0/1" is like "mlx5_3/1"."""
    return re.sub(r"\d+", "#", port)


def moved_between(port: PortSamples, begin_s: Floats, end_s: Floats) -> float:
    """Bytes moved in intervals, between samples in proportion."""
    moved_T = port.moved_T
    until = np.interp(end_s, port.t_s_T, moved_T)
    return float((until - np.interp(begin_s, port.t_s_T, moved_T)).sum())


# ---------------------------------------------------------------- one port


def _use(port: PortSamples) -> PortUse:
    t_T, moved_T, speed = port.t_s_T, port.moved_T, port.speed_bytes_per_s
    step_T = np.maximum(np.diff(moved_T), 0)  # a counter that falls was reset
    length_T = np.diff(t_T)
    windowed = _windowed_rates(t_T, np.concatenate([[0.0], np.cumsum(step_T)]))
    peak = float(windowed.max()) if len(windowed) else 0.0
    idle = IDLE_SHARE * (speed or peak)
    bursts = _bursts(port, step_T, length_T, idle)
    busy_s = sum(burst.end_s - burst.begin_s for burst in bursts)
    num_bytes = sum(burst.num_bytes for burst in bursts)
    busy_T = windowed > idle
    marks_T = port.marks_T[~np.isnan(port.marks_T)]
    changes = length_T[step_T > 0]
    congested_s = sum(b.end_s - b.begin_s for b in bursts if b.marks > 0)
    return PortUse(
        host=port.host,
        port=port.port,
        seconds=float(t_T[-1] - t_T[0]),
        busy_s=busy_s,
        num_bytes=float(num_bytes),
        rate=num_bytes / busy_s if busy_s else 0.0,
        peak=peak,
        reached=peak / speed if speed else None,
        full_share=float((windowed[busy_T] >= FULL_SHARE * speed).mean())
        if speed and busy_T.any()
        else None,
        marks=float(marks_T[-1] - marks_T[0]) if len(marks_T) > 1 else None,
        congested_share=congested_s / busy_s if busy_s else 0.0,
        renewed_ms=_renewed_ms(t_T, step_T) if len(changes) > 1 else None,
        of_peers=None,
        bursts=tuple(bursts),
    )


def _windowed_rates(t_T: Floats, total_T: Floats) -> Floats:
    """Rate from each sample to the first one WINDOW_S later; empty where all is shorter."""
    after = np.searchsorted(t_T, t_T + WINDOW_S)
    known = after < len(t_T)
    first, last = np.flatnonzero(known), after[known]
    rates: Floats = (total_T[last] - total_T[first]) / (t_T[last] - t_T[first])
    if not len(rates) and len(t_T) > 1:
        return np.array([(total_T[-1] - total_T[0]) / (t_T[-1] - t_T[0])])
    return rates


def _renewed_ms(t_T: Floats, step_T: Floats) -> float:
    """Median time between two changes of the counter, of those nearer than ten times that."""
    gaps = np.diff(t_T[1:][step_T > 0])
    near = gaps[gaps <= 10 * np.median(gaps)]
    return round(1e3 * float(np.median(near)), 3)


def _bursts(port: PortSamples, step_T: Floats, length_T: Floats, idle: float) -> list[Burst]:
    busy = np.flatnonzero(step_T > idle * length_T)
    if not len(busy):
        return []
    begin_T, end_T = port.t_s_T[:-1], port.t_s_T[1:]
    breaks = np.flatnonzero(begin_T[busy[1:]] - end_T[busy[:-1]] > JOIN_S)
    firsts = busy[np.concatenate([[0], breaks + 1])]
    lasts = busy[np.concatenate([breaks, [len(busy) - 1]])]
    known = np.flatnonzero(~np.isnan(port.marks_T))
    total_T = np.concatenate([[0.0], np.cumsum(step_T)])
    found = []
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        begin_s, end_s = float(begin_T[first]), float(end_T[last])
        num_bytes = float(total_T[last + 1] - total_T[first])
        rate = num_bytes / (end_s - begin_s)
        speed = port.speed_bytes_per_s
        marks = _grown(port.marks_T, known, first, last + 1)
        found.append(Burst(begin_s, end_s, num_bytes, rate, rate / speed if speed else None, marks))
    return found


def _grown(marks_T: Floats, known: NDArray[np.intp], first: int, last: int) -> float:
    """Marks from the last reading before the burst to the first one behind it."""
    if not len(known):
        return 0.0
    low = max(0, int(np.searchsorted(known, first, side="right")) - 1)
    high = min(len(known) - 1, int(np.searchsorted(known, last)))
    return float(marks_T[known[high]] - marks_T[known[low]])


# ---------------------------------------------------------------- among others


def _among_peers(found: list[PortUse]) -> list[PortUse]:
    rates: Mapping[str, list[float]] = defaultdict(list)
    for use in found:
        if use.busy_s:
            rates[kind_of(use.port)].append(use.rate)
    out = []
    for use in found:
        peers = rates[kind_of(use.port)]
        usual = float(np.median(peers)) if len(peers) >= FEWEST_PEERS else 0.0
        of_peers = use.rate / usual if usual and use.busy_s else None
        out.append(replace(use, of_peers=of_peers))
    return out
