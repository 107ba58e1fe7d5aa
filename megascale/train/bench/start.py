"""The verb `bench step`: check every case, run them, write their rows, print the table last."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import typer

from megascale.env import rank_environment, switch_multicast_off
from megascale.errors import ConfigError
from megascale.flux.bench.rows import append
from megascale.train.bench.beside import Beside
from megascale.train.bench.bubble import bubble_cases, measure_bubble
from megascale.train.bench.bubble import summary as bubble_summary
from megascale.train.bench.case import Case, make_case
from megascale.train.bench.climb import Climb, climb, table
from megascale.train.bench.ladder import Planned, plan_ladder
from megascale.train.bench.measure import Run, check_losses, check_same, run_case
from megascale.train.bench.rows import Origin, Row, ladder_row, step_row
from megascale.train.bench.waterfall import MARKED, SILENT, run_waterfall
from megascale.train.bench.waterfall import table as waterfall_table
from megascale.train.devices import runs_on_gpus

RESULTS = Path("benchmarks/results")
FAILED = 1


def bench_step(
    recipe: Path,
    overrides: Sequence[str],
    *,
    nproc: int = 1,
    ablate: bool = False,
    waterfall: bool = False,
    without_communication: bool = False,
    bubble: bool = False,
    roof: bool = False,
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
    kind = _kind(ablate=ablate, waterfall=waterfall, bubble=bubble)
    output = output or RESULTS / f"{kind}.jsonl"
    references = _baselines(baselines)
    _check_options(nproc, rounds, target)
    check_output(output)
    _check_combination(
        kind,
        target=target,
        baselines=references,
        roof=roof,
        without_communication=without_communication,
        rounds=rounds,
    )
    num_gpus = torch.cuda.device_count()
    make = partial(make_case, recipe, num_ranks=nproc, model=model, num_gpus=num_gpus)
    planned: list[Planned] = []
    cases: list[Case]
    if kind == "ladder":
        planned = plan_ladder(recipe, overrides, nproc, model=model, num_gpus=num_gpus)
        cases = [plan.case for plan in planned if plan.case is not None]
    elif kind == "bubble":
        cases = bubble_cases(recipe, overrides, nproc, model=model, num_gpus=num_gpus)
    elif kind == "waterfall":
        marked = [*overrides, *MARKED]
        cases = [make(marked), make([*marked, *SILENT])]
    else:
        cases = [make(overrides)]
    origin = Origin.here(
        num_ranks=nproc,
        on_gpus=runs_on_gpus(cases[0].config, num_gpus),
        command=shlex.join(["megascale", *reproducible(arguments)]),
        given_commit=commit,
    )
    if origin.on_gpus:
        switch_multicast_off()
    if kind == "ladder":
        return _ladder(planned, rounds, origin, output)
    if kind == "bubble":
        write = partial(append, output)
        rows = measure_bubble(cases, rounds, origin, measure=_checked, write=write)
        typer.echo(bubble_summary(rows))
        return 0
    if kind == "waterfall":
        silent = cases[1] if without_communication else None
        row = run_waterfall(cases[0], origin, measure=run_case, silent_case=silent)
        append(output, row)
        typer.echo(waterfall_table(row))
        return 0
    runs = _rounds(cases[0], rounds, Beside(roof=True) if roof else None)
    row = step_row(cases[0], runs, origin, target=target, baselines=references)
    append(output, row)
    typer.echo(_summary(row))
    return 0


def _checked(case: Case) -> Run:
    run = run_case(case)
    check_losses(run, case.config)
    return run


def _rounds(case: Case, rounds: int, beside: Beside | None) -> list[Run]:
    """Runs of one case, which all compute the same."""
    runs: list[Run] = []
    for _ in range(rounds):
        run = run_case(case, beside)
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
    names = ("case", "value", "roof", "step_s", "host_ms", "lead_ms", "peak_gb", "met")
    shown = {key: row[key] for key in names if key in row}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _kind(*, ablate: bool, waterfall: bool, bubble: bool) -> str:
    """What is measured, which is also the name of the file of rows."""
    asked = {"ladder": ablate, "waterfall": waterfall, "bubble": bubble}
    kinds = [kind for kind, wanted in asked.items() if wanted]
    if len(kinds) > 1:
        raise ConfigError(
            "of --ablate, --waterfall and --bubble more than one is given; each measures something "
            "else: give one"
        )
    return kinds[0] if kinds else "step"


def _check_combination(
    kind: str,
    *,
    target: float | None,
    baselines: dict[str, float],
    roof: bool,
    without_communication: bool,
    rounds: int,
) -> None:
    """Options that mean nothing beside others."""
    option = {"ladder": "--ablate"}.get(kind, f"--{kind}")
    if kind != "step" and (target is not None or baselines):
        raise ConfigError(
            f"--target or --baseline is given with {option}; they are about the MFU of one case: "
            "leave them out"
        )
    if kind != "step" and roof:
        raise ConfigError(f"--roof is given with {option}; measure it with one case")
    if roof and "roof" in baselines:
        raise ConfigError(
            f"--baseline roof={baselines['roof']} is given with --roof, which measures the roof "
            "and writes it under that name; leave one out, or name the baseline otherwise"
        )
    if without_communication and kind != "waterfall":
        raise ConfigError(
            "--without-communication is given without --waterfall, which it checks; a step without "
            "communication is good for nothing else"
        )
    if kind == "waterfall" and rounds > 1:
        raise ConfigError(f"--rounds is {rounds} with --waterfall, which is of one run; give 1")


def _check_options(nproc: int, rounds: int, target: float | None) -> None:
    launcher = rank_environment().launcher
    if launcher != "none":
        raise ConfigError(
            f"the bench was started as a rank by {launcher}; it starts its ranks itself: start it "
            "once, with --nproc"
        )
    for option, value in (("--nproc", nproc), ("--rounds", rounds)):
        if value < 1:
            raise ConfigError(f"{option} is {value}; give 1 or more")
    if target is not None:
        _check_mfu(f"--target is {target}", target)


def check_output(output: Path) -> None:
    """Raises ConfigError where rows could not be appended to `output`; writes nothing."""
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file that rows are appended to")
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if there != output and not there.is_dir():
        raise ConfigError(f"--output {output} lies below {there}, which is a file; name another")
    try:
        if there == output:
            output.open("a").close()
        else:
            tempfile.TemporaryFile(
                dir=there
            ).close()  # asked of the system, which knows all reasons
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be written ({there}: {error.strerror}); name another file"
        ) from None


def _check_mfu(given: str, value: float) -> None:
    if not 0.0 < value <= 1.0:  # also what is not a number
        raise ConfigError(f"{given}; MFU is a fraction above 0 and at most 1, such as 0.544")


def _baselines(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for item in given:
        name, _, value = item.partition("=")
        if name in found:
            raise ConfigError(
                f"--baseline {name} is given twice; a row has one value of each: drop one"
            )
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(f"--baseline is {item!r}; give name=mfu, such as megatron_core=0.544")
        _check_mfu(f"--baseline is {item!r}", found[name])
    return found


def reproducible(arguments: Sequence[str]) -> list[str]:
    """The arguments that say what was measured; not where rows went, nor the commit again."""
    dropped = ("--output", "--commit")
    kept = iter(arguments)
    return [
        argument
        for argument in kept
        if not argument.startswith(tuple(f"{name}=" for name in dropped))
        and (argument not in dropped or not next(kept))
    ]
