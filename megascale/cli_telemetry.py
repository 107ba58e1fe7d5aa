"""The verbs that look at a run: `diagnose`, `dashboard`, `trace`, `profile`, `monitor`, `stream`.

Each is a few lines; what it does is in `megascale.telemetry`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def trace(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="NAME.json, or NAME.json.gz to compress")
    ],
    first: Annotated[int | None, typer.Option(help="first step; default: the newest 20")] = None,
    last: Annotated[int | None, typer.Option(help="last step")] = None,
    ranks: Annotated[str | None, typer.Option(help="such as 0-7,12; default: all")] = None,
    view: Annotated[
        str | None, typer.Option(help="tensor, data or pipeline: groups beside each other")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="with --view: only the group of this rank")
    ] = None,
    align: Annotated[
        bool, typer.Option(help="put the hosts' clocks together by what ranks waited for")
    ] = True,
) -> None:
    """One timeline of all ranks for Perfetto, with arrows between sends, receives, collectives."""
    from megascale.telemetry.timeline.command import trace_run
    from megascale.telemetry.timeline.selection import Selection, parse_ranks

    selection = Selection(parse_ranks(ranks) if ranks is not None else None, view, rank)
    lines = trace_run(run_dir, output, first=first, last=last, selection=selection, align=align)
    for line in lines:
        typer.echo(line)
