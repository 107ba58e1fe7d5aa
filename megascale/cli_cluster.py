"""The verbs of a job on several nodes: `run`, `chaos`, `selfcheck` (`cli.py` has the others)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="override a key; may be repeated"),
]


def run(
    words: Annotated[
        list[str], typer.Argument(metavar="RECIPE", help="with --script: -- PROGRAM ARGUMENTS")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="machines that train")] = 1,
    procs_per_node: Annotated[int, typer.Option(min=1, help="ranks of each")] = 1,
    spares: Annotated[
        int | None, typer.Option(min=0, help="machines kept warm; default: cluster.spares")
    ] = None,
    backend: Annotated[str, typer.Option(help="local, slurm or kubernetes")] = "local",
    backend_set: Annotated[
        list[str] | None,
        typer.Option("--backend-set", metavar="KEY=VALUE", help="an option of the backend"),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="continue the run in job.run_dir")] = False,
    script: Annotated[
        bool, typer.Option("--script", help="run a program of your own, without a recipe")
    ] = False,
    run_dir: Annotated[Path | None, typer.Option(help="with --script: the run's folder")] = None,
    host: Annotated[str, typer.Option(help="address that the driver listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free")] = 0,
    render: Annotated[
        bool, typer.Option("--render", help="write what Kubernetes is to have, and start nothing")
    ] = False,
) -> None:
    """Train on several nodes: a driver, an agent a node; faults are found and repaired."""
    if render:
        from megascale.cluster.driver.rendering import render_run
        from megascale.cluster.driver.start import option_pairs

        text = render_run(
            words,
            script=script,
            run_dir=run_dir,
            overrides=overrides or [],
            nodes=nodes,
            procs_per_node=procs_per_node,
            spares=spares,
            backend=backend,
            options=option_pairs(backend_set or []),
            port=port,
        )
        typer.echo(text, nl=False)
        return
    from megascale.cluster.driver.start import run_verb

    code = run_verb(
        words,
        script=script,
        run_dir=run_dir,
        overrides=overrides or [],
        nodes=nodes,
        procs_per_node=procs_per_node,
        spares=spares,
        backend=backend,
        backend_options=backend_set or [],
        resume=resume,
        host=host,
        port=port,
    )
    raise typer.Exit(code)


def chaos(
    schedule: Annotated[Path, typer.Argument(help="TOML file of faults, such as chaos/short.toml")],
    recipe: Annotated[Path, typer.Argument(help="TOML recipe of the job that has them")],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="new folder; default: runs/chaos/SCHEDULE-TIME")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="run the job without faults too, and compare its losses")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="the result as one JSON object")] = False,
) -> None:
    """Faults on purpose, into a real job of this machine: what each was taken for, and its cost."""
    from megascale.cluster.chaos.run import chaos as run

    folder = run_dir or Path("runs/chaos") / time.strftime(f"{schedule.stem}-%Y%m%d-%H%M%S")

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    result = run(schedule, recipe, overrides or [], folder=folder, compare=compare, say=say)
    typer.echo(result.json_text() if as_json else result.text())
    raise typer.Exit(0 if result.ok else 1)


def selfcheck(
    level: Annotated[str, typer.Option(help="light or full")] = "light",
    as_json: Annotated[bool, typer.Option("--json", help="the report as one JSON object")] = False,
    peers: Annotated[
        list[str] | None,
        typer.Option(metavar="PEER@HOST:PORT/RANK", help="an all-reduce with it; may be repeated"),
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="what is learned is kept in it")] = Path("runs"),
    expected: Annotated[Path | None, typer.Option(help="TOML over the package's figures")] = None,
    deadline_s: Annotated[float, typer.Option(min=1.0, help="for everything")] = 120.0,
) -> None:
    """Check this node: host, GPUs, memory, speed, links, and that it computes right."""
    from megascale.cluster.selfcheck.start import selfcheck as run

    raise typer.Exit(run(level, deadline_s, run_dir, expected, peers or [], as_json, typer.echo))
