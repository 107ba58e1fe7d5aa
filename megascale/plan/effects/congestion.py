"""Incast and all-to-all on a lossless fabric under two laws of congestion control (MegaScale 3.6).

The paper: DCQCN's defaults, at scale and under all-to-all, led to pauses (PFC) and head-of-line
blocking; a law of its own that joins Swift's round-trip times with ECN's quick answer did not. Here
both laws (`congestion_laws.py`) run on the same simulated switch (`lossless_switch.py`), flow by
flow. What comes out is a comparison of the two laws as they stand here, simulated: the paper prints
neither its law nor a figure.

In incast the first milliseconds decide: DCQCN's alpha is still near 1, so that it cuts deep, and
before that nothing bounds what its senders have under way. Left alone for tens of milliseconds it
comes to the same goodput, with longer queues, and with pauses where senders are many.

Seeded: senders begin within `START_S` of each other, packets are marked at random, all-to-all has
random orders. Several draws run side by side, on switches that know nothing of each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megascale.errors import ConfigError
from megascale.plan.effects.congestion_laws import (
    Dcqcn,
    DcqcnConstants,
    Feedback,
    Hybrid,
    HybridConstants,
    Law,
)
from megascale.plan.effects.interval import Interval, check_count, check_number, interval_of
from megascale.plan.effects.lossless_switch import (
    Flags,
    Floats,
    Ints,
    Switches,
    SwitchSettings,
    in_proportion,
    steps_of,
)

LawName = Literal["dcqcn", "hybrid"]
START_S = 20e-6
VICTIMS = 4
USUAL = SwitchSettings()


@dataclass(frozen=True)
class Congestion:
    """What one law made of one pattern; intervals over draws.

    goodput       share of the bottleneck's bandwidth that delivered bytes
    pauses        of input ports, their number; `paused_share` of the ports' time
    queue_bytes   the most that waited at one output
    victim_loss   share that flows to idle outputs lost of what their sender's link had left
    """

    goodput: Interval
    pauses: Interval
    paused_share: Interval
    queue_bytes: Interval
    victim_loss: Interval


@dataclass
class _Run:
    """Flows of all draws, side by side, and what became of them."""

    law: Law
    switches: Switches
    rng: np.random.Generator
    delivered: Floats = field(init=False)
    _under_way: Floats = field(init=False)
    _heard: list[Feedback | None] = field(init=False)

    def __post_init__(self) -> None:
        num_flows = len(self.switches.inputs)
        self.delivered, self._under_way = np.zeros((2, num_flows))
        self._heard = [None] * self.switches.settings.feedback_steps

    def step(self, may: Flags, most: Floats | None, now_s: float) -> Floats:
        """Flows that `may` send, at most `most` bytes; what they sent."""
        switches, settings = self.switches, self.switches.settings
        wanted = self.law.wanted(self._under_way) * (may & switches.may_send())
        if most is not None:
            wanted = np.minimum(wanted, most)
        sent = in_proportion(wanted, switches.inputs, switches.num_ports, settings.step_bytes)
        left, queue = switches.step(sent)
        self._under_way = self._under_way + sent
        self.delivered += left
        share = switches.marked_share(queue)
        packets = left / settings.packet_bytes
        marked = self.rng.random(len(left)) < -np.expm1(packets * np.log1p(-share * (1 - 1e-12)))
        heard = self._heard.pop(0)
        self._heard.append(Feedback(left, queue, share, marked))
        if heard is not None:
            self._under_way = np.maximum(0.0, self._under_way - heard.acked_bytes)
            self.law.hear(heard, sent, now_s)
        return sent


def incast(
    senders: int,
    law: LawName,
    *,
    seed: int = 0,
    seconds: float = 6e-3,
    num_draws: int = 3,
    settings: SwitchSettings = USUAL,
) -> Congestion:
    """`senders` flows without end to one port; on the first few senders also a flow to a port of
    its own, the victims."""
    check_count("senders", senders)
    check_count("num_draws", num_draws)
    check_number("seconds", seconds, least=0.0, above=True)
    victims = min(VICTIMS, senders)
    each = senders + 1 + victims  # ports of a switch: senders, the receiver, the victims' outputs
    inputs = np.concatenate([np.arange(senders), np.arange(victims)])
    outputs = np.concatenate([np.full(senders, senders), senders + 1 + np.arange(victims)])
    run, start_s = _begin(inputs, outputs, each, num_draws, law, settings, seed)
    num_steps = steps_of(seconds, settings)
    for step in range(num_steps):
        run.step(start_s <= step * settings.step_s, None, step * settings.step_s)
    link_bytes = num_steps * settings.step_bytes
    of_draw = run.delivered.reshape(num_draws, -1)
    left_over = link_bytes - of_draw[:, :victims]  # of the link of a victim's sender
    lost = 1.0 - of_draw[:, senders:] / np.maximum(left_over, 1.0)
    goodput = of_draw[:, :senders].sum(axis=1) / link_bytes
    ports_s = seconds * senders
    return _outcome(run, goodput, np.clip(lost, 0.0, 1.0).mean(axis=1), ports_s)


def all_to_all(
    hosts: int,
    law: LawName,
    *,
    seed: int = 0,
    message_bytes: float = 1e6,
    at_once: int = 4,
    num_draws: int = 3,
    settings: SwitchSettings = USUAL,
) -> Congestion:
    """Every host sends a message to every other, in an order of its own, `at_once` at a time, until
    the last has arrived. There are no victims but the messages themselves."""
    if hosts < 2:
        raise ConfigError(f"hosts is {hosts}; legal is 2 or more: one has nobody to send to")
    check_count("at_once", at_once)
    check_count("num_draws", num_draws)
    check_number("message_bytes", message_bytes, least=0.0, above=True)
    pairs = np.array([(a, b) for a in range(hosts) for b in range(hosts) if a != b])
    run, _ = _begin(pairs[:, 0], pairs[:, 1], hosts, num_draws, law, settings, seed)
    turn = _turns(run.rng, hosts, num_draws)
    to_send = np.full(len(run.delivered), float(message_bytes))
    every, step, ends = message_bytes * len(pairs), 0, np.zeros(num_draws)
    longest = 200 * steps_of(every / hosts / settings.bytes_per_s, settings) + 10_000
    while not ends.all():
        to_send -= run.step(
            _in_turn(to_send, turn, hosts, at_once), to_send, step * settings.step_s
        )
        to_send[to_send < 1.0] = 0.0
        step += 1
        arrived = run.delivered.reshape(num_draws, -1).sum(axis=1)
        done = arrived > every - len(pairs) * 2.0
        ends = np.where(done & (ends == 0), step * settings.step_s, ends)
        assert step < longest, (hosts, law, arrived / every)
    ideal_s = every / hosts / settings.bytes_per_s
    return _outcome(run, ideal_s / ends, np.zeros(num_draws), ends * hosts)


def _turns(rng: np.random.Generator, hosts: int, num_draws: int) -> Ints:
    """Of each flow, when its sender comes to it: 0 first. Flows are sorted by sender."""
    return np.concatenate([rng.permutation(hosts - 1) for _ in range(hosts * num_draws)])


def _in_turn(to_send: Floats, turn: Ints, hosts: int, at_once: int) -> Flags:
    """Flows that are among the first `at_once` of their sender that have not sent all."""
    of_host = np.where(to_send > 0.0, turn, hosts).reshape(-1, hosts - 1)
    last = min(at_once, hosts - 1) - 1
    allowed = np.partition(of_host, last, axis=1)[:, last : last + 1]
    return np.asarray((of_host <= allowed).reshape(-1) & (to_send > 0.0))


def _begin(
    inputs: Ints,
    outputs: Ints,
    ports_each: int,
    num_draws: int,
    law: LawName,
    settings: SwitchSettings,
    seed: int,
) -> tuple[_Run, Floats]:
    """The run of all draws, and when each flow begins."""
    rng = np.random.default_rng(seed)
    first_port = np.repeat(np.arange(num_draws) * ports_each, len(inputs))
    all_inputs = np.tile(inputs, num_draws) + first_port
    all_outputs = np.tile(outputs, num_draws) + first_port
    switches = Switches(settings, all_inputs, all_outputs, ports_each, num_draws)
    run = _Run(_law(law, len(all_inputs), settings), switches, rng)
    return run, rng.uniform(0.0, START_S, len(all_inputs))


def _law(law: LawName, num_flows: int, settings: SwitchSettings) -> Law:
    if law == "dcqcn":
        return Dcqcn(num_flows, settings, DcqcnConstants())
    if law == "hybrid":
        return Hybrid(num_flows, settings, HybridConstants())
    raise ConfigError(f"congestion control {law!r}; legal: dcqcn, hybrid")


def _outcome(
    run: _Run, goodput: Floats, victim_loss: Floats, ports_s: Floats | float
) -> Congestion:
    switches = run.switches
    return Congestion(
        goodput=interval_of(np.minimum(1.0, goodput)),
        pauses=interval_of(switches.pauses),
        paused_share=interval_of(switches.paused_s / ports_s),
        queue_bytes=interval_of(switches.most_queue),
        victim_loss=interval_of(victim_loss),
    )
