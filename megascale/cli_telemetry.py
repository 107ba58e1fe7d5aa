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


def dashboard(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR|DRIVER_URL", help="folder of a run, or its driver")
    ],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(help="who has its token may act; of a driver's address: the driver's token"),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="open it in a browser")
    ] = True,
) -> None:
    """The run in a browser, live: what is wrong now, curves, heat map, timeline, topology, logs."""
    from megascale.telemetry.dashboard.server import serve

    serve(
        run,
        host=host,
        port=port,
        token_file=token_file,
        open_browser=open_browser,
        say=typer.echo,
    )


def stream(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    queue: Annotated[
        str | None,
        typer.Option(help="redis://HOST:PORT/NAME or kafka://HOST:PORT/TOPIC; default: the run's"),
    ] = None,
    store: Annotated[bool, typer.Option(help="keep the run's store from the queue")] = True,
    files: Annotated[bool, typer.Option(help="follow this node's line files")] = True,
    ranks: Annotated[str | None, typer.Option(help="such as 0-7,12; default: all")] = None,
) -> None:
    """Stream a run's line files to its queue, and store them, until it is interrupted.

    A run without this is stored by who reads it; `megascale run` does it by itself where
    telemetry.queue is set.
    """
    import logging

    from megascale.telemetry.path.command import Stream, stream_until_signal, telemetry_config
    from megascale.telemetry.timeline.selection import parse_ranks

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    part = Stream(
        run_dir,
        telemetry_config(run_dir, queue),
        streams=files,
        stores=store,
        ranks=None if ranks is None else parse_ranks(ranks),
    )
    done = stream_until_signal(part)
    typer.echo(f"{done.num_bytes / 1e6:.1f} MB streamed, {done.num_segments} segments stored")
