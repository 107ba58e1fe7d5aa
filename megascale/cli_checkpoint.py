"""The verbs that look after checkpoints: `megascale checkpoint ls`, `verify`, `prune`, `convert`.

Each is a few lines; what it does is in `megascale.checkpoint.commands`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from megascale.errors import CheckpointError

checkpoint_app = typer.Typer(
    help="List, verify, prune and convert checkpoints, in folders or on s3://, hdfs://, ...",
    no_args_is_help=True,
)
Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="run folder, its checkpoints/, or such a URL")
]
AsJson = Annotated[bool, typer.Option("--json", help="the answer as JSON")]


class Form(StrEnum):
    """What `convert` makes."""

    CHECKPOINT = "checkpoint"
    SAFETENSORS = "safetensors"


class State(StrEnum):
    """What `convert --to safetensors` takes."""

    MASTERS = "masters"
    ALL = "all"


@checkpoint_app.command("ls")
def list_(root: Root, as_json: AsJson = False) -> None:
    """Each checkpoint of a run: step, save number, time, size, files, state. Nothing is hashed."""
    from megascale.checkpoint.commands import list_all, location, root_of
    from megascale.checkpoint.commands.listing import HEADINGS

    found = list_all(root_of(location(root)))
    if as_json:
        typer.echo(json.dumps([asdict(listed) for listed in found], indent=1))
        return
    typer.echo(HEADINGS)
    for listed in found:
        typer.echo(listed.line())


@checkpoint_app.command()
def verify(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="checkpoints, or roots: all that they committed"),
    ],
    as_json: AsJson = False,
) -> None:
    """Hash every byte. Exit code 0: all are good; 4: at least one is not."""
    from megascale.checkpoint.commands import checkpoints_at, location, verify_all

    places = [place for path in paths for place in checkpoints_at(location(path))]
    verdicts = verify_all(
        places, (lambda _: None) if as_json else (lambda verdict: typer.echo(verdict.line()))
    )
    if as_json:
        rows = [{**asdict(verdict), "good": verdict.is_good} for verdict in verdicts]
        typer.echo(json.dumps(rows, indent=1))
    if not all(verdict.is_good for verdict in verdicts):
        raise typer.Exit(CheckpointError.exit_code)


@checkpoint_app.command()
def prune(
    root: Root,
    keep: Annotated[int, typer.Option(help="how many of the newest stay; at least 1")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be removed, remove nothing")
    ] = False,
) -> None:
    """Remove older checkpoints, never the last good one, and what interrupted saves left."""
    from megascale.checkpoint.commands import location, root_of
    from megascale.checkpoint.commands import prune as prune_root

    gone = prune_root(root_of(location(root)), keep, dry_run=dry_run)
    for place in gone:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {place}")
    if not gone:
        typer.echo("nothing to remove")


@checkpoint_app.command()
def convert(
    source: Annotated[str, typer.Argument(help="checkpoint, or a root: its newest")],
    output: Annotated[
        str, typer.Argument(help="folder or URL that gets it; for safetensors a new folder")
    ],
    to: Annotated[Form, typer.Option(help="what to make of it")] = Form.CHECKPOINT,
    state: Annotated[
        State, typer.Option(help="for safetensors: parameters in fp32, or optimizer state too")
    ] = State.MASTERS,
) -> None:
    """Copy a checkpoint to another storage, verified there, or write its whole tensors."""
    from megascale.checkpoint.commands import (
        copy_checkpoint,
        location,
        newest_at,
        write_safetensors,
    )

    place = newest_at(location(source))
    if to is Form.CHECKPOINT:
        typer.echo(f"{place} -> {copy_checkpoint(place, location(output))}, verified")
        return
    num = write_safetensors(place, location(output), all_state=state is State.ALL)
    typer.echo(f"{place} -> {output}: {num} whole tensors")
