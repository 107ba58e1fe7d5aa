"""megascale and the peers in turn, on the same GPUs in the same minutes; one row of `step` a case.

    python -m benchmarks.peers.compare 175b-tp2-mbs1 7b-dp2 --rounds 2 --budget-s 500

Each round runs every system once (A B C A B C), so that drifting clocks meet all of them alike; a
system's figure is the median over its rounds. A run that fails or computes something else costs its
system the row's baseline, and the others go on. With --budget-s a run is not started where it would
not end in time, and is named.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.cases import (
    CASES,
    DEFAULT_SYSTEMS,
    OURS,
    PEERS,
    Peer,
    Setup,
    checked_case,
    our_command,
    peer_command,
)
from benchmarks.peers.options import require
from benchmarks.peers.result import Result
from benchmarks.peers.rows import rows_of
from benchmarks.peers.runs import Failed, OutOfMemory, run_ours, run_peer
from megascale.env import switch_multicast_off
from megascale.errors import ConfigError, MegascaleError
from megascale.flux.bench.rows import append
from megascale.train.bench.case import Case, runs_on_gpus
from megascale.train.bench.measure import Run
from megascale.train.bench.rows import Origin, Row
from megascale.train.bench.start import RESULTS

START_S = 25.0  # of megascale, an estimate like those of the peers
DRY_PORT = 29500
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
    """What the runs of a case gave. `flags` are those with which a peer fitted into memory."""

    ours: list[Run] = field(default_factory=list)
    peers: dict[str, list[Result]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    not_started: list[str] = field(default_factory=list)
    flags: dict[str, int] = field(default_factory=dict)
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
        found.flags[system] = index
        found.peers[system].append(result)
        times = ", ".join(f"{seconds:.3f}" for seconds in result.step_s)
        return " ".join([f"steps {times} s, {result.peak_reserved_gb:.1f} GB", *more])
    raise Failed(f"{last}, with {' '.join(peer.fallbacks[-1]) if peer.fallbacks else 'all flags'}")


def _estimate(setup: Setup, case: Case, system: str, found: Found) -> float:
    """Seconds of the next run: those of the last, else by the table."""
    if system in found.took_s:
        return found.took_s[system]
    start_s = START_S if system == OURS else PEERS[system].start_s
    return start_s + 1.2 * setup.step_s * case.config.training.steps


def main(
    arguments: Sequence[str] | None = None, *, runners: Runners | None = None, say: Say = print
) -> int:
    """The exit code: 0 where every run was made, 2 for what cannot be run."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _parser().parse_args(given)
    try:
        return _compare(parsed, given, runners, say)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _compare(parsed: Any, given: Sequence[str], runners: Runners | None, say: Say) -> int:
    systems = _systems(parsed.systems)
    num_gpus = torch.cuda.device_count()
    cases = {
        name: checked_case(
            _setup(name),
            steps=parsed.steps,
            more=parsed.overrides,
            num_gpus=2 if parsed.dry else num_gpus,
        )
        for name in parsed.cases
    }
    if parsed.dry:
        _print_commands(cases, systems, say)
        return 0
    _check_gpus(cases, num_gpus)
    if runners is None:
        for system in systems:
            if system != OURS:
                require(PEERS[system].title, PEERS[system].modules)
    with tempfile.TemporaryDirectory(prefix="peers-logs-") as folder:
        logs = parsed.logs or Path(folder)
        runners = runners or Runners(run_ours, partial(run_peer, logs=logs))
        return _all_cases(parsed, given, cases, systems, runners, say, num_gpus)


def _check_gpus(cases: dict[str, Case], num_gpus: int) -> None:
    on_cpu = [name for name, case in cases.items() if case.config.training.device == "cpu"]
    if num_gpus == 0 and len(on_cpu) < len(cases):
        raise ConfigError(
            "this machine has no GPU; compare on one that has, print the commands with --dry, or "
            "let everything run on the CPU with --set training.device=cpu"
        )


def _all_cases(
    parsed: Any,
    given: Sequence[str],
    cases: dict[str, Case],
    systems: Sequence[str],
    runners: Runners,
    say: Say,
    num_gpus: int,
) -> int:
    budget, complete = Budget(parsed.budget_s), True
    for name, case in cases.items():
        origin = Origin.here(
            num_ranks=case.num_ranks,
            on_gpus=runs_on_gpus(case.config, num_gpus),
            command=shlex.join(["python", "-m", "benchmarks.peers.compare", *_again(given)]),
            given_commit=parsed.commit,
        )
        if origin.on_gpus:
            switch_multicast_off()
        found = measure(
            name,
            _setup(name),
            case,
            systems,
            parsed.rounds,
            budget,
            runners,
            say,
            parsed.save_memory,
        )
        step, rows = rows_of(case, found.ours, found.peers, origin)
        if step is not None:
            append(parsed.output, step)
        for row in rows:
            append(parsed.output.with_name("peers.jsonl"), row)
        say(table(name, rows, found))
        complete = complete and not found.failed and not found.not_started
    return 0 if complete else 1


def table(name: str, rows: Sequence[Row], found: Found) -> str:
    """The case as text; `ours over it` is megascale's tokens a second over the system's."""
    rate = "tokens_per_s_per_gpu"
    ours = next((row[rate] for row in rows if row["case"]["system"] == OURS), None)
    lines = [
        f"\n{name}",
        f"{'system':16} {'step_s':>8} {'mfu %':>7} {'GB':>6} {'ours over it':>13}",
    ]
    for row in rows:
        share = "" if row["value"] is None else f"{100 * row['value']:.2f}"
        ratio = "" if ours is None else f"{ours / row[rate]:.3f}"
        system = row["case"]["system"]
        lines.append(
            f"{system:16} {row['step_s']:8.3f} {share:>7} {row['peak_gb']:6.1f} {ratio:>13}"
        )
    lines += [f"{system:16} {reason.splitlines()[0]}" for system, reason in found.failed.items()]
    lines += [f"not started: {label}" for label in found.not_started]
    return "\n".join(lines)


def _print_commands(cases: dict[str, Case], systems: Sequence[str], say: Say) -> None:
    for name, case in cases.items():
        say(f"# {name}")
        for system in systems:
            if system == OURS:
                say(shlex.join(our_command(case)))
                continue
            peer = PEERS[system]
            settings = [f"{key}={value}" for key, value in peer.variables.items()]
            say(shlex.join(["env", *settings, *peer_command(peer, case, DRY_PORT)]))


def _setup(name: str) -> Setup:
    if name not in CASES:
        raise ConfigError(f"case {name!r} is not known; legal: {', '.join(CASES)}")
    return CASES[name]


def _systems(given: str) -> list[str]:
    legal = (OURS, *PEERS)
    systems = [system for system in given.split(",") if system]
    for system in systems:
        if system not in legal:
            raise ConfigError(f"--systems has {system!r}; legal: {', '.join(legal)}")
    if not systems:
        raise ConfigError(f"--systems names none; legal: {', '.join(legal)}")
    return systems


def _again(given: Sequence[str]) -> list[str]:
    """The arguments that say what was measured; not where rows and logs went."""
    kept, dropped = iter(given), ("--output", "--commit", "--logs")
    return [part for part in kept if part not in dropped or not next(kept)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers.compare", description=f"cases: {', '.join(CASES)}"
    )
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--systems", default=",".join(DEFAULT_SYSTEMS), help="in this order")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of every run; a case has a default")
    parser.add_argument("--budget-s", type=float, default=0.0, help="0: no limit")
    parser.add_argument(
        "--save-memory", type=int, default=0, help="start peers with their N-th flags that do"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "step.jsonl")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the peers printed")
    parser.add_argument("--commit", help="of a tree that has no repository")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry", action="store_true", help="print the commands and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
