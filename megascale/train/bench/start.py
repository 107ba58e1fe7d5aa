"""The verb `bench step`: check every case, run them, write their rows, print the table last."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
import typer

from megascale.env import rank_environment, switch_multicast_off
from megascale.errors import ConfigError
from megascale.flux.bench.rows import append
from megascale.train.bench.case import Case, make_case, runs_on_gpus
from megascale.train.bench.climb import Climb, climb, table
from megascale.train.bench.ladder import Planned, plan_ladder
from megascale.train.bench.measure import Run, check_losses, check_same, run_case
from megascale.train.bench.rows import Origin, Row, ladder_row, step_row

RESULTS = Path("benchmarks/results")
FAILED = 1


def bench_step(
    recipe: Path,
    overrides: Sequence[str],
    *,
    nproc: int = 1,
    ablate: bool = False,
    rounds: int = 1,
    output: Path | None = None,
    commit: str | None = None,
    model: str | None = None,
    target: float | None = None,
    baselines: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> int:
    """Measure; 0 where every case that was run has its row.

    Raises ConfigError for what cannot be run, before anything is started; and for one case, without
    `ablate`, LaunchError or NumericalError where it failed.
    """
    output = output or RESULTS / ("ladder.jsonl" if ablate else "step.jsonl")
    references = _baselines(baselines)
    _check_options(nproc, rounds, output, one_case_only=ablate and (target or references))
    num_gpus = torch.cuda.device_count()
    if ablate:
        planned = plan_ladder(recipe, overrides, nproc, model=model, num_gpus=num_gpus)
        cases = [plan.case for plan in planned if plan.case is not None]
    else:
        planned = []
        cases = [make_case(recipe, overrides, nproc, model=model, num_gpus=num_gpus)]
    origin = Origin.here(
        num_ranks=nproc,
        on_gpus=runs_on_gpus(cases[0].config, num_gpus),
        command=shlex.join(["megascale", *_reproducible(arguments)]),
        given_commit=commit,
    )
    if origin.on_gpus:
        switch_multicast_off()
    if ablate:
        return _ladder(planned, rounds, origin, output)
    runs = _rounds(cases[0], rounds)
    row = step_row(cases[0], runs, origin, target=target, baselines=references)
    append(output, row)
    typer.echo(_summary(row))
    return 0


def _rounds(case: Case, rounds: int) -> list[Run]:
    """Runs of one case, which all compute the same."""
    runs: list[Run] = []
    for _ in range(rounds):
        run = run_case(case)
        check_losses(run, case.config)
        if runs:
            check_same(run, runs[0], case.config.training.dtype, "the first round")
        runs.append(run)
    return runs


def _ladder(planned: Sequence[Planned], rounds: int, origin: Origin, output: Path) -> int:
    def make_row(plan: Planned, runs: Sequence[Run], below: Sequence[Row]) -> Row:
        assert plan.case is not None, plan.rung.name
        row = ladder_row(plan, plan.case, runs, below, origin)
        append(output, row)
        return row

    found = Climb(planned)
    try:
        climb(found, rounds, measure=run_case, make_row=make_row, say=typer.echo)
    finally:
        typer.echo(f"\n{table(found)}")
    if not origin.on_gpus:
        typer.echo("on a CPU the ladder shows that it works, and nothing about speed")
    return FAILED if found.failed else 0


def _summary(row: Row) -> str:
    shown = {key: row[key] for key in ("case", "value", "step_s", "peak_gb", "met")}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _check_options(nproc: int, rounds: int, output: Path, *, one_case_only: object) -> None:
    launcher = rank_environment().launcher
    if launcher != "none":
        raise ConfigError(
            f"the bench was started as a rank by {launcher}; it starts its ranks itself: start it "
            "once, with --nproc"
        )
    for option, value in (("--nproc", nproc), ("--rounds", rounds)):
        if value < 1:
            raise ConfigError(f"{option} is {value}; give 1 or more")
    if one_case_only:
        raise ConfigError(
            "--target or --baseline is given with --ablate; they are about one case: leave them out"
        )
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file that rows are appended to")
    blocked = next((path for path in output.parents if path.exists() and not path.is_dir()), None)
    if blocked is not None:
        raise ConfigError(f"--output {output} lies below {blocked}, which is a file; name another")


def _baselines(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for item in given:
        name, _, value = item.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"--baseline is {item!r}; give name=mfu, such as megatron_core=0.544"
            ) from None
    return found


def _reproducible(arguments: Sequence[str]) -> list[str]:
    """The arguments that say what was measured; not where rows went, nor the commit again."""
    dropped = ("--output", "--commit")
    kept = iter(arguments)
    return [
        argument
        for argument in kept
        if not argument.startswith(tuple(f"{name}=" for name in dropped))
        and (argument not in dropped or not next(kept))
    ]
