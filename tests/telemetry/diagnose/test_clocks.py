"""Clocks of hosts: the truth lies inside the stated error, whatever was planted.

Hosts meet in collectives and by transfers over a simulated network; each reads its own clock, which
is ahead of the true one by a planted offset. The error must hold for every host and seed, and be as
small as the shortest transfers allow.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from megascale.telemetry.diagnose.clocks import Clocks, Meetings, align

Floats = NDArray[np.float64]
HOUR_NS = 3_600 * 10**9
NOW_NS = 1_780_000_000 * 10**9  # wall time, beyond what a float64 holds to the ns


class Network:
    """Meetings between hosts whose clocks are `ahead_ns_H` of the true time."""

    def __init__(self, ahead_ns_H: Floats, seed: int, *, noise_ns: float = 0.0) -> None:
        self.ahead_ns_H, self.noise_ns = ahead_ns_H, noise_ns
        self.random = np.random.default_rng(seed)
        self._number = 0
        self._begins: list[tuple[NDArray[np.int64], ...]] = []
        self._ends: list[tuple[NDArray[np.int64], ...]] = []

    def collective(self, hosts: NDArray[np.int64], at_ns: float, skew_ns: float) -> None:
        """Members come within `skew_ns`; each is through some time after the last has come."""
        begins = at_ns + self.random.uniform(0, skew_ns, len(hosts))
        ends = begins.max() + self.random.exponential(50_000, len(hosts))
        self._add(self._begins, hosts, begins)
        self._add(self._ends, hosts, ends)
        self._number += 1

    def transfer(self, source: int, destination: int, at_ns: float, latency_ns: float) -> None:
        self._add(self._begins, np.array([source]), np.array([at_ns]))
        self._add(self._ends, np.array([destination]), np.array([at_ns + latency_ns]))
        self._number += 1

    def meetings(self) -> Meetings:
        columns = [
            np.concatenate(part)
            for all_ in (self._begins, self._ends)
            for part in zip(*all_, strict=True)
        ]
        return Meetings(*columns)

    def _add(
        self, rows: list[tuple[NDArray[np.int64], ...]], hosts: NDArray[np.int64], true_ns: Floats
    ) -> None:
        noise = self.random.uniform(-self.noise_ns, self.noise_ns, len(hosts))
        read = NOW_NS + np.rint(true_ns + self.ahead_ns_H[hosts] + noise).astype(np.int64)
        rows.append((np.full(len(hosts), self._number), hosts.astype(np.int64), read))


def off_by(clocks: Clocks, ahead_ns_H: Floats) -> Floats:
    """How far each host is from the truth, seen from the reference, ns."""
    corrected = clocks.correction_ns_H + ahead_ns_H
    return np.abs(corrected - corrected[clocks.reference])


def assert_inside(clocks: Clocks, ahead_ns_H: Floats) -> None:
    off = off_by(clocks, ahead_ns_H)
    known = ~np.isnan(off)
    rounding_ns = 2.0
    assert np.all(off[known] <= clocks.error_ns_H[known] + rounding_ns), (
        off[known] - clocks.error_ns_H[known]
    ).max()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise_ns", [0.0, 15_000.0])
def test_the_truth_is_inside_the_error(seed: int, noise_ns: float) -> None:
    """Columns meet in collectives, rows in a pipeline, of 24 hosts; one is an hour off."""
    random = np.random.default_rng(seed)
    ahead = random.normal(0, 5e6, 24)
    ahead[seed % 24] += HOUR_NS * (1 if seed % 2 else -1)
    network = Network(ahead, seed, noise_ns=noise_ns)
    latency_ns = 1e3 if seed % 3 else 1e5  # also such that the noise is larger than the latency
    for step in range(4):
        for group in range(4):
            network.collective(np.arange(6) + 6 * group, step * 1e9, skew_ns=20e6)
        for host in range(24 - 6):
            at = step * 1e9 + random.uniform(0, 1e8)
            network.transfer(host, host + 6, at, random.exponential(latency_ns))
            network.transfer(host + 6, host, at, random.exponential(latency_ns))
    clocks = align(network.meetings(), 24, reading_error_ns=noise_ns)
    assert clocks.unknown == []
    assert clocks.contradiction_ns == 0.0
    assert_inside(clocks, ahead)
    assert np.max(clocks.error_ns_H) < 20e6
    assert abs(np.median(clocks.correction_ns_H)) < 1.0


def test_the_error_is_half_of_what_the_shortest_transfers_leave() -> None:
    ahead = np.array([0.0, 4_000_000.0])
    network = Network(ahead, 0)
    for latency in (900_000.0, 250_000.0, 600_000.0):
        network.transfer(0, 1, 1e9, latency)
        network.transfer(1, 0, 2e9, 2 * latency)
    clocks = align(network.meetings(), 2)
    other = 1 - clocks.reference
    assert clocks.error_ns_H[other] == (250_000.0 + 500_000.0) / 2
    assert_inside(clocks, ahead)
    assert off_by(clocks, ahead)[other] == pytest.approx(125_000.0)


def test_a_chain_adds_up() -> None:
    network = Network(np.zeros(5), 0)
    for host in range(4):
        network.transfer(host, host + 1, 0.0, 100.0)
        network.transfer(host + 1, host, 0.0, 100.0)
    clocks = align(network.meetings(), 5)
    steps = np.abs(np.arange(5) - clocks.reference)
    np.testing.assert_array_equal(clocks.error_ns_H, 100.0 * steps)


def test_hosts_without_bounds_are_unknown() -> None:
    ahead = np.array([0.0, 1e6, 2e6, 3e6, 4e6, HOUR_NS])
    network = Network(ahead, 1)
    network.collective(np.array([0, 1, 2]), 0.0, 1e5)  # two islands, a host that only
    network.collective(np.array([0, 1, 2]), 1e9, 1e5)
    network.collective(np.array([3, 4]), 0.0, 1e5)  # receives, and their clocks
    network.transfer(0, 5, 0.0, 1e5)
    clocks = align(network.meetings(), 6)
    assert clocks.unknown == [3, 4, 5]
    assert np.isnan(clocks.error_ns_H[3:]).all()
    assert_inside(clocks, ahead)


def test_no_meetings_at_all() -> None:
    none = np.empty(0, dtype=np.int64)
    clocks = align(Meetings(none, none, none, none, none, none), 3)
    assert clocks.unknown == [1, 2]
    assert clocks.correction_ns_H[0] == clocks.error_ns_H[0] == 0.0


def test_meetings_that_only_began_or_only_ended_say_nothing() -> None:
    one = np.array([0]), np.array([0]), np.array([NOW_NS])
    other = np.array([1]), np.array([1]), np.array([NOW_NS])
    assert align(Meetings(*one, *other), 2).unknown == [1]


@pytest.mark.parametrize("jump_ns", [4e6, -9e6, 40e6, 1e9, HOUR_NS, 6.3e7])
def test_a_clock_that_jumps_is_said_and_inside_the_error(jump_ns: float) -> None:
    still, jumped = np.zeros(3), np.array([0.0, jump_ns, 0.0])
    network = Network(still, 2)
    for step in range(6):
        network.ahead_ns_H = jumped if step >= 3 else still
        network.collective(np.arange(3), step * 1e9, 1e5)
    clocks = align(network.meetings(), 3)
    assert abs(jump_ns) / 4 < clocks.contradiction_ns + 1e5 < abs(jump_ns)
    assert_inside(clocks, still)
    assert_inside(clocks, jumped)


def test_no_jump_no_contradiction() -> None:
    network = Network(np.zeros(3), 2)
    for step in range(6):
        network.collective(np.arange(3), step * 1e9, 1e5)
    assert align(network.meetings(), 3).contradiction_ns == 0.0


def test_1536_hosts_in_a_second() -> None:
    """12,288 ranks in nodes of 8: a stage has 192 hosts, which data groups span."""
    num_hosts, stages = 1536, 8
    a_stage = num_hosts // stages
    ahead = np.random.default_rng(3).normal(0, 2e6, num_hosts)
    network = Network(ahead, 3)
    for step in range(2):
        for stage in range(stages):
            for group in range(4):
                hosts = np.arange(a_stage) + a_stage * stage
                network.collective(hosts, step * 1e9 + group * 1e8, 3e6)
        for host in range(num_hosts - a_stage):
            network.transfer(host, host + a_stage, step * 1e9, 5e4)
            network.transfer(host + a_stage, host, step * 1e9, 5e4)
    meetings = network.meetings()
    began = time.perf_counter()
    clocks = align(meetings, num_hosts)
    assert time.perf_counter() - began < 1.0
    assert clocks.unknown == []
    assert_inside(clocks, ahead)
    assert np.median(clocks.error_ns_H) < 1e6
