"""The verbs that plan: `plan`, `simulate`, `calibrate`. They need no GPU, but for `calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megascale.cli_cluster import Overrides
from megascale.errors import ConfigError

ClusterFile = Annotated[
    str | None,
    typer.Option("--cluster", help="cluster file, or h200 (default), h100, a100, paper"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def plan(
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(help="TOML recipe")] = None,
    overrides: Overrides = None,
    cluster: ClusterFile = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="default: all of the cluster")] = None,
    top: Annotated[int, typer.Option(min=1, help="layouts to show")] = 5,
    tokens: Annotated[
        float | None, typer.Option(help="to train on: days, GPU-hours and cost are told for them")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price-per-gpu-hour", min=0.0, help="in your currency")
    ] = None,
    max_tensor: Annotated[
        int | None,
        typer.Option("--max-tensor", min=1, help="most devices a layer; default: those of a node"),
    ] = None,
    ideal: Annotated[
        bool, typer.Option("--ideal", help="no slow node, no late launch: no effect of scale")
    ] = False,
    conflicts: Annotated[
        bool, typer.Option("--conflicts", help="count conflicts of hashes in the network")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="write one HTML file with plots")] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="predict what was measured, and show the errors")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="--validate: CSV of further measured runs")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which layout, what step time, MFU and memory, why the runner-up lost, and how sure."""
    if validate:
        from megascale.plan.validate.table import start_validation

        _refuse_beside_validate(context)
        typer.echo(start_validation(data, as_json=as_json))
        return
    if data is not None:
        raise ConfigError("--data was given without --validate, which alone reads it; add that")
    from megascale.plan.search.scale import Scale
    from megascale.plan.start import start_plan

    typer.echo(
        start_plan(
            recipe,
            overrides or [],
            cluster=cluster,
            gpus=gpus,
            top=top,
            tokens=tokens,
            price=price,
            max_tensor=max_tensor,
            scale=Scale(ideal=ideal, conflicts=conflicts),
            report=report,
            as_json=as_json,
        )
    )


def _refuse_beside_validate(context: typer.Context) -> None:
    """Validation has its own cases: what else is given would be ignored in silence."""
    legal = {"validate", "data", "as_json"}
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in legal
        if (source := context.get_parameter_source(parameter.name)) is not None
        if source.name != "DEFAULT"
    ]
    if given:
        raise ConfigError(
            f"--validate was given with {', '.join(given)}; its cases are measured runs: "
            "give it alone, or with --data FILE or --json"
        )


def simulate(
    recipe: Annotated[Path | None, typer.Argument(help="TOML recipe")] = None,
    overrides: Overrides = None,
    cluster: ClusterFile = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="default: all of the cluster")] = None,
    paper: Annotated[
        str | None, typer.Option(help="replay table2, table3 or fig9 of the paper")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="write the step as a Chrome / Perfetto trace")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a step's action lists at the cluster's prices: a timeline, and where the time goes."""
    from megascale.plan.simulate.start import start_simulation

    typer.echo(
        start_simulation(
            recipe,
            overrides or [],
            cluster=cluster,
            gpus=gpus,
            paper=paper,
            trace=trace,
            as_json=as_json,
        )
    )


def calibrate(
    output: Annotated[Path, typer.Argument(help="cluster file to write")],
    nproc: Annotated[int | None, typer.Option(min=1, help="devices; default: all here")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a coarse grid: a minute")] = False,
    budget_s: Annotated[float, typer.Option(min=1, help="no sample begins after it")] = 300.0,
) -> None:
    """Measure this machine's devices and links, and write a cluster file for `plan`."""
    from megascale.train.calibrate.start import start_calibration

    typer.echo(start_calibration(output, nproc=nproc, quick=quick, budget_s=budget_s))
