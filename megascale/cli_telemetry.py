"""The verbs that look at a run: `diagnose`, `dashboard`, `trace`, `profile`, `monitor`, `stream`.

Each is a few lines; what it does is in `megascale.telemetry`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN [READER]",
            help="folder of a run, and what to ask; with --compare several folders",
            show_default=False,
        ),
    ] = None,
    first: Annotated[int | None, typer.Option(help="first step; default: the newest")] = None,
    last: Annotated[int | None, typer.Option(help="last step")] = None,
    ranks: Annotated[str | None, typer.Option(help="such as 0-7,12; default: all")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE of the reader; repeatable")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="the MFU of all given runs beside each other")
    ] = False,
    sql: Annotated[str | None, typer.Option(help="one SELECT over the run's tables")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the answer as JSON")] = False,
    fail_on: Annotated[
        str | None, typer.Option(help="notice or alert: exit 1 where something of it is found")
    ] = None,
    list_readers: Annotated[
        bool, typer.Option("--list", help="the readers, what each asks")
    ] = False,
) -> None:
    """What is wrong with a run, live or ended: slow, uneven, stuck, drifting, and since when."""
    from megascale.telemetry.readers.command import Request, diagnose_run, reader_lines

    if list_readers:
        for line in reader_lines():
            typer.echo(line)
        return
    request = Request(
        arguments=tuple(arguments or ()),
        first_step=first,
        last_step=last,
        ranks=ranks,
        options=tuple(option or ()),
        compare=compare,
        sql=sql,
        as_json=as_json,
        fail_on=fail_on,
    )
    raise typer.Exit(diagnose_run(request, typer.echo))


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


def profile(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run that lives")],
    what: Annotated[
        str, typer.Option(help="spans, torch (operators and kernels) or memory (allocations)")
    ] = "torch",
    steps: Annotated[int, typer.Option(min=1, help="how many")] = 3,
    ranks: Annotated[str | None, typer.Option(help="such as 0-7,12; default: all")] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="first step; default: the first that all can reach")
    ] = None,
    name: Annotated[str | None, typer.Option(help="folder in RUN/profiles")] = None,
    timeout_s: Annotated[float | None, typer.Option(min=1, help="how long to wait")] = None,
) -> None:
    """Profile the next steps of a live run: RUN/profiles/NAME, a file a rank."""
    from megascale.telemetry.profiling import profile_run
    from megascale.telemetry.timeline.selection import parse_ranks

    profile_run(
        run_dir,
        what=what,
        num_steps=steps,
        ranks=None if ranks is None else parse_ranks(ranks),
        first_step=first,
        name=name,
        timeout_s=timeout_s,
        say=typer.echo,
    )


def dashboard(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR|DRIVER_URL", help="folder of a run, or its driver")
    ],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="who has its token may act; of a driver's address: the driver's token, else of "
            "MEGASCALE_TOKEN_FILE"
        ),
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
    from megascale.telemetry.shown import counted
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
    segments = counted(done.num_segments, "segment")
    typer.echo(f"{done.num_bytes / 1e6:.1f} MB streamed, {segments} stored")


def monitor(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    interval_ms: Annotated[float, typer.Option(help="between samples, 1 to 1000")] = 2.0,
    seconds: Annotated[float, typer.Option(help="how long")] = 10.0,
    ports: Annotated[
        list[str] | None,
        typer.Option("--port", help="pattern such as 'mlx5*'; repeatable; default: all but lo"),
    ] = None,
    root: Annotated[Path, typer.Option(help="of the counters, or of a tree like it")] = Path(
        "/sys"
    ),
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="ask all nodes of a live run for it")
    ] = False,
) -> None:
    """Sample the byte counters of this node's ports by the millisecond, into the run's folder."""
    from megascale.telemetry.monitor.command import Monitoring, monitor_run

    what = Monitoring(interval_ms, seconds, root, tuple(ports or ()))
    monitor_run(run_dir, what, everywhere=everywhere, say=typer.echo)
