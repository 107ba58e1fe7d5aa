"""Sample this node's ports for some seconds, in a process of its own.

    python -m megascale.telemetry.monitor --file NODE.jsonl [--interval-ms 2 --seconds 10 ...]

Prints one line of JSON: what was achieved, and how many ports there are. SIGTERM ends it early;
what was sampled is written.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megascale.env import hostname
from megascale.events import Counters, Header, Incident
from megascale.telemetry.monitor.nvlink import nvlink_ports
from megascale.telemetry.monitor.ports import Source, sysfs_ports
from megascale.telemetry.monitor.sampling import Achieved, Series, sample
from megascale.telemetry.writer import LineWriter
from megascale.topology import Mesh

_FLUSH_EVENTS = 4096


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parse(arguments)
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _frame: ended.append(signum))
    ports: list[Source] = [*sysfs_ports(given.root, given.ports)]
    if given.nvlink:
        ports += nvlink_ports()
    series, achieved = sample(
        ports,
        interval_s=given.interval_ms / 1e3,
        seconds=given.seconds,
        stopped=lambda: bool(ended),
    )
    signal.signal(signal.SIGTERM, before)  # it may end now as it likes: lines are written whole
    for port in ports:
        port.close()
    write(given.file, given.host or hostname(), series, achieved)
    print(json.dumps({**asdict(achieved), "num_ports": len(ports)}), flush=True)


def write(file: Path, host: str, series: Sequence[Series], achieved: Achieved) -> None:
    """Append the samples to the node's file, behind a header that places their times."""
    with LineWriter(file, rank=-1, buffer_events=4 * _FLUSH_EVENTS) as writer:
        writer(_header(host))
        number = 0
        for one in series:
            for t_ns, sent, received, marks in zip(
                one.t_ns, one.sent, one.received, one.marks, strict=True
            ):
                writer(
                    Counters(
                        rank=-1,
                        host=host,
                        port=one.port,
                        t_ns=t_ns,
                        sent_bytes=sent,
                        received_bytes=received,
                        speed_bytes_per_s=one.speed_bytes_per_s,
                        congestion=None if marks < 0 else marks,
                    )
                )
                number += 1
                if number % _FLUSH_EVENTS == 0:
                    writer.flush()
        now_ns = time.monotonic_ns()
        detail = {"host": host, **asdict(achieved)}
        writer(Incident(rank=-1, name="monitor", t_ns=now_ns, detail=detail))


def _header(host: str) -> Header:
    """Of a node: `rank` -1."""
    mesh = Mesh()
    return Header(
        rank=-1,
        world_size=mesh.world_size,
        tensor=mesh.tensor,
        data=mesh.data,
        pipeline=mesh.pipeline,
        tp_rank=0,
        dp_rank=0,
        pp_rank=0,
        host=host,
        pid=0,
        epoch=0,
        unix_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megascale.telemetry.monitor")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--interval-ms", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--root", type=Path, default=Path("/sys"))
    parser.add_argument("--ports", nargs="*", default=[])
    parser.add_argument("--host", default="")
    parser.add_argument("--no-nvlink", dest="nvlink", action="store_false")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
