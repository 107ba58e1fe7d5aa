"""The turns of a case: each round runs every system once, within a budget of seconds.

A run that fails costs its system alone. A peer that is out of memory is tried again with flags that
save some, and keeps those that fitted. A figure is of runs of one kind: where a later round needs
more of them, the rounds before are thrown away, and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.cases import OURS, PEERS, Peer, Setup
from benchmarks.peers.result import Result
from benchmarks.peers.runs import Failed, OutOfMemory
from megascale.errors import MegascaleError
from megascale.train.bench.case import Case
from megascale.train.bench.measure import Run

START_S = 25.0  # of megascale, an estimate like those of the peers
Say = Callable[[str], None]


class Budget:
    """Seconds that are left, by the clock that is handed in. `limit_s` 0 has no end."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since = clock()

    @property
    def left_s(self) -> float:
        if not self._limit_s:
            return float("inf")
        return self._limit_s - (self._clock() - self._since)


@dataclass
class Found:
    """What the runs of a case gave.

    flags      which of its sets of flags a peer fitted into memory with
    discarded  its runs without those flags, from rounds in which it fitted without
    """

    ours: list[Run] = field(default_factory=list)
    peers: dict[str, list[Result]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    not_started: list[str] = field(default_factory=list)
    flags: dict[str, int] = field(default_factory=dict)
    discarded: dict[str, int] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Runners:
    """How a run is made; tests hand in their own."""

    ours: Callable[[Case, float], Run]
    peer: Callable[[Peer, Case, Sequence[str], float], Result]


def measure(
    name: str,
    setup: Setup,
    case: Case,
    systems: Sequence[str],
    rounds: int,
    budget: Budget,
    runners: Runners,
    say: Say,
    save_memory: int = 0,
) -> Found:
    """All rounds of a case. A system that failed is out for the rounds after it.

    save_memory  how many of its sets of flags a peer skips, which are known not to fit
    """
    peers = [system for system in systems if system != OURS]
    found = Found(
        peers={system: [] for system in peers},
        flags={system: min(save_memory, len(PEERS[system].fallbacks)) for system in peers},
    )
    for number in range(1, rounds + 1):
        for system in systems:
            if system in found.failed:
                continue
            label = f"{name}, {system}, round {number} of {rounds}"
            needs_s = _estimate(setup, case, system, found)
            if needs_s > budget.left_s:
                found.not_started.append(label)
                say(f"{label}: not started, needs about {needs_s:.0f} s of {budget.left_s:.0f} s")
                continue
            since = time.monotonic()
            try:
                say(f"{label}: {_run(system, case, found, needs_s, budget, runners)}")
            except MegascaleError as error:
                found.failed[system] = str(error)
                say(f"{label}: {error}")
            found.took_s[system] = time.monotonic() - since
    return found


def _run(
    system: str, case: Case, found: Found, needs_s: float, budget: Budget, runners: Runners
) -> str:
    """Make a run and keep it; a line about it. Raises MegascaleError where there is nothing."""
    if system == OURS:
        limit_s = min(3 * needs_s + 60, budget.left_s)
        run = runners.ours(case, limit_s)
        found.ours.append(run)
        return f"steps {', '.join(format(step['step_s'], '.3f') for step in run.steps)} s"
    peer = PEERS[system]
    for index, more in list(enumerate(((), *peer.fallbacks)))[found.flags[system] :]:
        limit_s = min(3 * needs_s + 60, budget.left_s)
        try:
            result = runners.peer(peer, case, more, limit_s)
        except OutOfMemory as error:
            last = error
            continue
        thrown = ""
        if index > found.flags[system] and found.peers[system]:
            num_runs = len(found.peers[system])
            found.discarded[system] = found.discarded.get(system, 0) + num_runs
            found.peers[system].clear()
            thrown = f"; {num_runs} run(s) without these flags are discarded"
        found.flags[system] = index
        found.peers[system].append(result)
        times = ", ".join(f"{seconds:.3f}" for seconds in result.step_s)
        return " ".join([f"steps {times} s, {result.peak_reserved_gb:.1f} GB", *more]) + thrown
    raise Failed(f"{last}, with {' '.join(peer.fallbacks[-1]) if peer.fallbacks else 'all flags'}")


def _estimate(setup: Setup, case: Case, system: str, found: Found) -> float:
    """Seconds of the next run: those of the last, else by the table."""
    if system in found.took_s:
        return found.took_s[system]
    start_s = START_S if system == OURS else PEERS[system].start_s
    return start_s + 1.2 * setup.step_s * case.config.training.steps
