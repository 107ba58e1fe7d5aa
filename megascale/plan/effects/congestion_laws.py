"""How senders answer congestion: DCQCN, and the paper's join of round-trip times and ECN.

DCQCN (Zhu et al., SIGCOMM 2015): a receiver that sees marked packets sends one notification in
50 us; the sender cuts its rate by alpha / 2 and raises alpha, else lets alpha decay; it recovers in
halves towards the rate before the cut five times by a timer and by a counter of bytes, then adds,
then adds more. Nothing bounds what is under way.

Hybrid (MegaScale 3.6: "combines the principles of Swift and DCQCN", a precise measurement of the
round trip with a fast response to ECN; no formula and no constant is printed, so this is a form of
our own). Swift (Kumar et al., SIGCOMM 2020): a window that falls in proportion to how far the round
trip is above a target, once a round trip, and else grows by a packet a round trip. In front of it
the marks: after the first of a base round trip the window falls by alpha / 2, alpha being the
moving share of marked packets, without waiting until the queue shows in the round trip. A window
bounds what is under way, whatever the signals do.

Constants are those of the papers from memory, not checked against their text; what is ours says
"chosen". Flows begin at line rate, and with a window that fills the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megascale.plan.effects.lossless_switch import Flags, Floats, SwitchSettings


@dataclass(frozen=True)
class Feedback:
    """What reaches senders in a step, of a moment ago.

    acked_bytes   that left the switch then
    queue_bytes   that waited at the flow's output then
    mark_share    chance of a mark on what left; `marked`: whether any of its packets was
    """

    acked_bytes: Floats
    queue_bytes: Floats
    mark_share: Floats
    marked: Flags


class Law(Protocol):
    """Bytes that each flow may send in a step, given what it has under way and what it heard."""

    def wanted(self, under_way: Floats) -> Floats: ...

    def hear(self, heard: Feedback, sent: Floats, now_s: float) -> None: ...


@dataclass(frozen=True)
class DcqcnConstants:
    """Of Zhu et al.; rates scaled with the link from its 40 Gb/s."""

    gain: float = 1 / 256
    notice_s: float = 50e-6  # one notification a flow
    alpha_s: float = 55e-6  # without one, alpha decays
    timer_s: float = 55e-6
    counter_bytes: float = 10e6
    fast_rounds: int = 5
    add_share: float = 40e6 / 40e9  # of the link's rate: 40 Mb/s of 40 Gb/s
    add_more_share: float = 200e6 / 40e9  # chosen: five times that
    least_share: float = 1e-3  # chosen


class Dcqcn:
    """Rates of all flows at once."""

    def __init__(self, num_flows: int, settings: SwitchSettings, constants: DcqcnConstants) -> None:
        self._settings, self._c = settings, constants
        self._line = settings.bytes_per_s
        self.rate = np.full(num_flows, self._line)
        self._target = np.full(num_flows, self._line)
        self._alpha = np.ones(num_flows)
        self._cut_s, self._decay_s, self._timer_s = np.full((3, num_flows), -1.0)
        self._bytes = np.zeros(num_flows)
        self._timed = np.zeros(num_flows, dtype=np.int64)
        self._counted = np.zeros(num_flows, dtype=np.int64)

    def wanted(self, under_way: Floats) -> Floats:
        del under_way
        return self.rate * self._settings.step_s

    def hear(self, heard: Feedback, sent: Floats, now_s: float) -> None:
        c = self._c
        cut = heard.marked & (now_s - self._cut_s >= c.notice_s)
        self._target = np.where(cut, self.rate, self._target)
        self.rate = np.where(cut, self.rate * (1 - self._alpha / 2), self.rate)
        self._alpha = np.where(cut, (1 - c.gain) * self._alpha + c.gain, self._alpha)
        self._cut_s = np.where(cut, now_s, self._cut_s)
        decay = ~cut & (now_s - np.maximum(self._cut_s, self._decay_s) >= c.alpha_s)
        self._alpha = np.where(decay, (1 - c.gain) * self._alpha, self._alpha)
        self._decay_s = np.where(decay, now_s, self._decay_s)
        self._timed[cut] = self._counted[cut] = 0
        self._bytes = np.where(cut, 0.0, self._bytes + sent)
        self._timer_s = np.where(cut, now_s, self._timer_s)
        by_time = now_s - self._timer_s >= c.timer_s
        by_bytes = self._bytes >= c.counter_bytes
        self._timer_s = np.where(by_time, now_s, self._timer_s)
        self._bytes = np.where(by_bytes, 0.0, self._bytes)
        self._timed += by_time
        self._counted += by_bytes
        self._raise(by_time | by_bytes)
        self.rate = np.clip(self.rate, c.least_share * self._line, self._line)

    def _raise(self, due: Flags) -> None:
        c = self._c
        most = np.maximum(self._timed, self._counted)
        least = np.minimum(self._timed, self._counted)
        add = np.where(most > c.fast_rounds, c.add_share, 0.0)
        add = np.where(least > c.fast_rounds, c.add_more_share, add)
        target = np.minimum(self._target + add * self._line, self._line)
        self._target = np.where(due, target, self._target)
        self.rate = np.where(due, (self._target + self.rate) / 2, self.rate)


@dataclass(frozen=True)
class HybridConstants:
    """Swift's (Kumar et al.) but for the target, which is chosen with the link."""

    target_queue_s: float = 12e-6  # chosen: above the base round trip
    beta: float = 0.8
    most_cut: float = 0.5
    add_packets: float = 1.0  # a round trip
    mark_gain: float = 1 / 16  # DCTCP's (Alizadeh et al., SIGCOMM 2010)
    least_packets: float = 0.01


class Hybrid:
    """Windows of all flows at once."""

    def __init__(
        self, num_flows: int, settings: SwitchSettings, constants: HybridConstants
    ) -> None:
        self._settings, self._c = settings, constants
        self.window = np.full(num_flows, settings.window_bytes)
        self._alpha = np.ones(num_flows)
        self._cut_s = np.full(num_flows, -1.0)
        self._mark_cut_s = np.full(num_flows, -1.0)

    def wanted(self, under_way: Floats) -> Floats:
        settings = self._settings
        return np.clip(self.window - under_way, 0.0, settings.step_bytes)

    def hear(self, heard: Feedback, sent: Floats, now_s: float) -> None:
        del sent
        c, settings = self._c, self._settings
        base_s, packet = settings.base_rtt_s, settings.packet_bytes
        heard_of = heard.acked_bytes > 0.0
        round_trip_s = base_s + heard.queue_bytes / settings.bytes_per_s
        target_s = base_s + c.target_queue_s
        weight = c.mark_gain * np.minimum(1.0, heard.acked_bytes / np.maximum(self.window, 1.0))
        self._alpha += weight * (heard.mark_share - self._alpha)
        by_mark = heard_of & heard.marked & (now_s - self._mark_cut_s >= base_s)
        self.window = np.where(by_mark, self.window * (1 - self._alpha / 2), self.window)
        self._mark_cut_s = np.where(by_mark, now_s, self._mark_cut_s)
        late = round_trip_s > target_s
        by_delay = heard_of & late & (now_s - self._cut_s >= round_trip_s)
        excess = c.beta * (round_trip_s - target_s) / round_trip_s
        factor = 1.0 - np.clip(excess, 0.0, c.most_cut)
        self.window = np.where(by_delay, self.window * factor, self.window)
        self._cut_s = np.where(by_delay, now_s, self._cut_s)
        grown = c.add_packets * packet * heard.acked_bytes / np.maximum(self.window, packet)
        self.window = np.where(late, self.window, self.window + grown)
        self.window = np.clip(
            self.window, c.least_packets * packet, settings.window_bytes * target_s / base_s
        )
