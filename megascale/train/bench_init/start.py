"""The verb `bench init`: check every size, measure the rungs one by one, write their rows."""

from __future__ import annotations

import resource
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from megascale.errors import ConfigError, LaunchError
from megascale.flux.bench.rows import append
from megascale.train.bench.rows import Origin
from megascale.train.bench.start import check_output, reproducible
from megascale.train.bench_init.gloo import GlooJob
from megascale.train.bench_init.gloo import run as run_gloo
from megascale.train.bench_init.rows import gloo_row, shape_rows, simulated_row, versions
from megascale.train.bench_init.sequences import Barrier
from megascale.train.bench_init.servers import (
    SPARE_FILES,
    STORES,
    check_redis_server,
    serving,
)
from megascale.train.bench_init.simulate import Rung, measure, mesh_of

_FORMS: dict[str, Barrier | None] = {"poll": "poll", "wait": "wait", "own": None}
_REPLICA = 64  # ranks of tensor 8 and pipeline 8
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def bench_init(
    *,
    ranks: str,
    gloo: str,
    stores: str,
    forms: str,
    budget_s: float,
    processes: int,
    output: Path,
    commit: str | None,
    arguments: Sequence[str],
) -> int:
    """Measure and append a row a rung; 1 where a store failed one, which has no row then.

    Raises ConfigError before anything is started.
    """
    sizes, gloo_sizes = _sizes(ranks, "--ranks"), _sizes(gloo, "--gloo")
    kinds = _words(stores, STORES, "--stores")
    wanted = [_FORMS[form] for form in _words(forms, tuple(_FORMS), "--forms")]
    _check_sizes(sizes, gloo_sizes, processes)
    if "redis" in kinds:
        check_redis_server()
    check_output(output)
    origin = Origin.here(
        num_ranks=0,
        on_gpus=False,
        command=shlex.join(["megascale", *reproducible(arguments)]),
        given_commit=commit,
    )
    fields = {**origin.fields, "versions": {**origin.fields["versions"], **versions(kinds)}}
    origin = replace(origin, fields=fields)
    rungs = [Rung(store, barrier) for barrier in wanted for store in kinds]
    _gloo(rungs, gloo_sizes, origin, output)
    failed = _simulated(rungs, sizes, origin, output, budget_s=budget_s, processes=processes)
    return 1 if failed else 0


def _simulated(
    rungs: Sequence[Rung],
    sizes: Sequence[int],
    origin: Origin,
    output: Path,
    *,
    budget_s: float,
    processes: int,
) -> int:
    """How many rungs failed: a server that gives up at one size says nothing of the others."""
    failed = 0
    seconds: dict[tuple[Rung, int], float] = {}
    for num_ranks in sizes:
        for rung in rungs:
            try:
                found = measure(rung, num_ranks, budget_s=budget_s, processes=processes)
            except LaunchError as error:
                failed += 1
                told = f"{rung.store}, {rung.order}, barrier {rung.barrier or 'none'}"
                typer.echo(f"{num_ranks:6} ranks, {told}: failed, no row: {error}", err=True)
                continue
            seconds[rung, num_ranks] = found.seconds
            _write(output, simulated_row(rung, num_ranks, found, origin))
        for row in shape_rows(seconds, num_ranks, origin):
            _write(output, row)
    return failed


def _gloo(rungs: Sequence[Rung], sizes: Sequence[int], origin: Origin, output: Path) -> None:
    """torch's barrier is the one that waits; ordered creation with connections made at once, and
    when they are used."""
    for num_ranks in sizes:
        for rung in rungs:
            if rung.barrier == "poll":
                continue
            for lazy in (False, True) if rung.barrier is None else (False,):
                mesh = mesh_of(num_ranks)
                degrees = (mesh.tensor, mesh.data, mesh.pipeline)
                with serving(rung.store, num_ranks * 4) as server:
                    every = rung.barrier is not None
                    found = run_gloo(GlooJob(server.port, rung.store, degrees, every, lazy))
                _write(output, gloo_row(rung, num_ranks, found, origin, lazy=lazy))


def _write(output: Path, row: dict[str, Any]) -> None:
    append(output, row)
    case, met = row["case"], row.get("met")
    told = "" if met is None else f", target {row['target']['value']:g}: {met}"
    typer.echo(
        f"{case['ranks']:6} ranks, {case['what']:10} {case['store']:10} {case['order']:11} "
        f"{case['barrier']:5} {case['line']:10} {row['value']:10.3f} {row['metric']}"
        f" ({row.get('extent', '')}){told}"
    )


# ------------------------------------------------------------ what is refused


def _words(given: str, legal: Sequence[str], option: str) -> list[str]:
    words = [word for word in given.split(",") if word]
    wrong = [word for word in words if word not in legal]
    if wrong or not words:
        raise ConfigError(f"{option} is {given!r}; give some of {', '.join(legal)}, with commas")
    return words


def _sizes(given: str, option: str) -> list[int]:
    words = [word for word in given.split(",") if word and word != "0"]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"{option} is {given!r}; give numbers of ranks with commas, or 0: none")
    return [int(word) for word in words]


def _check_sizes(sizes: Sequence[int], gloo_sizes: Sequence[int], processes: int) -> None:
    for size in sizes:
        if size % _REPLICA:
            raise ConfigError(
                f"--ranks has {size}; a replica has {_REPLICA} ranks (tensor 8, pipeline 8): "
                f"nearest legal: {_nearest(size, _REPLICA)}"
            )
    for size in gloo_sizes:
        unit = 8 if size <= _REPLICA else _REPLICA
        if size % unit:
            raise ConfigError(f"--gloo has {size}; nearest legal: {_nearest(size, unit)}")
    most = _most_connections()
    too_many = [size for size in sizes if size > most]
    if too_many:
        raise ConfigError(
            f"--ranks has {too_many[0]}; this machine carries {most} connections (open files of a "
            f"process, ports of loopback): at most {most // _REPLICA * _REPLICA} ranks"
        )
    if processes < 1:
        raise ConfigError(f"--processes is {processes}; at least 1")


def _most_connections() -> int:
    """Every rank is a file of the server's and a port of the clients'."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES
    if not _PORTS.exists():
        return files
    first, last = map(int, _PORTS.read_text().split())
    return min(files, last - first + 1)


def _nearest(size: int, unit: int) -> str:
    below = size // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
