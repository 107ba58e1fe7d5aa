"""A lossless switch as fluid: shared buffer, ECN marks, PFC pauses, head-of-line blocking.

Bytes move in steps of two microseconds. A flow's bytes wait at the switch per flow and leave by its
output port in proportion to what waits there (a FIFO's composition). Per input port the switch
counts what came in and has not left; above a share of the free buffer it pauses the port, all of
whose flows then stop, wherever they go: that is head-of-line blocking. The pause reaches the sender
one propagation later, and what was under way is held by headroom. So nothing is ever dropped.

Constants: source or "chosen". Marking and pausing thresholds after Zhu et al. (SIGCOMM 2015, from
memory), bytes scaled with the link from its 40 Gb/s; buffer of the order of a chip of 25.6 Tb/s, as
the paper's (MegaScale 3.6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale.plan.effects.interval import check_number

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_ZHU_GBPS = 40.0


@dataclass(frozen=True)
class SwitchSettings:
    """One switch and the links of its ports.

    link_gbps       of every port (paper: a NIC's 200)
    base_rtt_s      sender to receiver and back, queues empty (chosen: two hops in a data centre)
    step_s          of the simulation (chosen)
    buffer_bytes    shared by all ports (chosen: 64 MB)
    pause_share     an input port is paused above this share of the free buffer (chosen: 1/8; Zhu
                    et al. let it follow the free buffer too)
    packet_bytes    of RoCE's largest (4,096)
    mark_from_bytes, mark_all_bytes, mark_most   RED on an output's queue: nothing below, all above,
                    between them up to `mark_most` (Zhu: 5 kB, 200 kB, 1 % at 40 Gb/s)
    """

    link_gbps: float = 200.0
    base_rtt_s: float = 8e-6
    step_s: float = 2e-6
    buffer_bytes: float = 64e6
    pause_share: float = 0.125
    packet_bytes: float = 4096.0
    mark_from_bytes: float = 5e3 * 200.0 / _ZHU_GBPS
    mark_all_bytes: float = 200e3 * 200.0 / _ZHU_GBPS
    mark_most: float = 0.01

    def __post_init__(self) -> None:
        for name in ("link_gbps", "base_rtt_s", "step_s", "buffer_bytes", "packet_bytes"):
            check_number(name, getattr(self, name), least=0.0, above=True)
        check_number("pause_share", self.pause_share, least=0.0, most=1.0, above=True)
        check_number("mark_most", self.mark_most, least=0.0, most=1.0)
        check_number("mark_from_bytes", self.mark_from_bytes, least=0.0, most=self.mark_all_bytes)
        check_number("base_rtt_s", self.base_rtt_s, least=2 * self.step_s)

    @property
    def bytes_per_s(self) -> float:
        return self.link_gbps * 1e9 / 8

    @property
    def step_bytes(self) -> float:
        """That a link carries in a step."""
        return self.bytes_per_s * self.step_s

    @property
    def window_bytes(self) -> float:
        """Bandwidth times delay: what fills a link without a queue."""
        return self.bytes_per_s * self.base_rtt_s

    @property
    def feedback_steps(self) -> int:
        """From the switch to the receiver and back to the sender."""
        return max(1, round(0.75 * self.base_rtt_s / self.step_s))

    @property
    def pause_steps(self) -> int:
        """From the switch to the sender."""
        return max(1, round(0.25 * self.base_rtt_s / self.step_s))


class Switches:
    """Several switches of equal size that know nothing of each other: a draw each.

    Flow f goes from port `inputs[f]` to port `outputs[f]` of its switch; ports of switch i are
    numbers i x ports_each and on. Seen so far, of each switch: `pauses`, their seconds summed over
    its ports, the most that waited at an output, and in all.
    """

    def __init__(
        self, settings: SwitchSettings, inputs: Ints, outputs: Ints, ports_each: int, number: int
    ) -> None:
        self.settings, self.inputs, self.outputs = settings, inputs, outputs
        self.num_ports, self._shape = ports_each * number, (number, ports_each)
        self.waiting = np.zeros(len(inputs))
        self.pauses = np.zeros(number)
        self.paused_s, self.most_queue, self.most_waiting = np.zeros((3, number))
        self._is_paused = np.zeros(self._shape, dtype=np.bool_)
        nobody = self._is_paused.reshape(-1)
        self._told = [nobody] * settings.pause_steps  # pauses on their way to the senders

    def may_send(self) -> Flags:
        """Flows whose sender is not paused, as far as it knows."""
        return ~self._told[0][self.inputs]

    def step(self, sent: Floats) -> tuple[Floats, Floats]:
        """(bytes of each flow that left, bytes that waited at its output) after `sent` came in."""
        settings = self.settings
        self.waiting = self.waiting + sent
        queue = per_port(self.outputs, self.waiting, self.num_ports)
        share = np.minimum(1.0, settings.step_bytes / np.maximum(queue, 1e-9))
        left = self.waiting * share[self.outputs]
        self.waiting = self.waiting - left
        self.most_queue = np.maximum(self.most_queue, queue.reshape(self._shape).max(axis=1))
        self._pause()
        return left, queue[self.outputs]

    def _pause(self) -> None:
        settings = self.settings
        came_in = per_port(self.inputs, self.waiting, self.num_ports).reshape(self._shape)
        in_all = came_in.sum(axis=1, keepdims=True)
        limit = settings.pause_share * np.maximum(0.0, settings.buffer_bytes - in_all)
        resume = np.maximum(0.0, limit - 2 * settings.packet_bytes)  # Zhu: two packets below
        paused = np.where(self._is_paused, came_in > resume, came_in > limit)
        self.pauses += np.count_nonzero(paused & ~self._is_paused, axis=1)
        self.paused_s += np.count_nonzero(paused, axis=1) * settings.step_s
        self.most_waiting = np.maximum(self.most_waiting, in_all[:, 0])
        self._is_paused = paused
        self._told = [*self._told[1:], paused.reshape(-1)]

    def marked_share(self, queue: Floats) -> Floats:
        """Chance that a packet which leaves a queue of so many bytes is marked."""
        settings = self.settings
        width = max(settings.mark_all_bytes - settings.mark_from_bytes, 1e-9)
        rising = settings.mark_most * (queue - settings.mark_from_bytes) / width
        return np.where(queue > settings.mark_all_bytes, 1.0, np.clip(rising, 0.0, 1.0))


def per_port(ports: Ints, num_bytes: Floats, num_ports: int) -> Floats:
    """Bytes of all flows, by their port."""
    return np.bincount(ports, num_bytes, num_ports).astype(np.float64)


def in_proportion(wanted: Floats, inputs: Ints, num_ports: int, most: float) -> Floats:
    """What senders put on the wire: of each input port at most `most`, in proportion."""
    of_port = per_port(inputs, wanted, num_ports)
    share = np.minimum(1.0, most / np.maximum(of_port, 1e-9))
    return np.asarray(wanted * share[inputs])


def steps_of(seconds: float, settings: SwitchSettings) -> int:
    return max(1, math.ceil(seconds / settings.step_s))
