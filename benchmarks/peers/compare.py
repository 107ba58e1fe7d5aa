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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import writable_folder
from benchmarks.peers.cases import (
    CASES,
    DEFAULT_SYSTEMS,
    OURS,
    PEERS,
    Setup,
    checked_case,
    our_command,
    peer_command,
)
from benchmarks.peers.options import require
from benchmarks.peers.rows import rows_of
from benchmarks.peers.runs import run_ours, run_peer
from benchmarks.peers.turns import Budget, Found, Runners, Say, measure
from megascale.env import switch_multicast_off
from megascale.errors import ConfigError
from megascale.flux.bench.rows import append
from megascale.train.bench.case import Case
from megascale.train.bench.rows import Origin, Row
from megascale.train.bench.start import RESULTS, check_output
from megascale.train.devices import runs_on_gpus

DRY_PORT = 29500


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
    _check_numbers(parsed)
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
    check_output(parsed.output)
    if runners is None:
        for system in systems:
            if system != OURS:
                require(PEERS[system].title, PEERS[system].modules)
    with tempfile.TemporaryDirectory(prefix="peers-logs-") as folder:
        logs = parsed.logs or Path(folder)
        runners = runners or Runners(run_ours, partial(run_peer, logs=logs))
        return _all_cases(parsed, given, cases, systems, runners, say, num_gpus)


def _check_numbers(parsed: Any) -> None:
    for option, value, least in (
        ("--rounds", parsed.rounds, 1),
        ("--budget-s", parsed.budget_s, 0),
        ("--save-memory", parsed.save_memory, 0),
    ):
        if not value >= least:  # also what is not a number
            raise ConfigError(f"{option} is {value}; give {least} or more")


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
        step, rows = rows_of(_setup(name), case, found, origin)
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
    parser.add_argument("--logs", type=writable_folder, help="folder for what peers printed")
    parser.add_argument("--commit", help="of a tree that has no repository")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry", action="store_true", help="print the commands and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
