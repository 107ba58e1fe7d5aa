"""What the path from line files to segments costs, and whether it loses anything.

    python -m benchmarks.telemetry.ingest [LINE ...] [--ranks N] [--seconds N] [--output FILE]

ingest     whole lines to durable segments, as readers do who catch up; a record is the sum of one
           rank, step and phase. Records over the CPU time of all threads of the process
always on  what `--ranks` ranks write at one step a second, 10 phases: line files -> streamer ->
           queue -> store -> merged segments. CPU seconds of a second of training, of all processes
           that take part, in this process and over a redis-server; the ranks' own writing is not
           counted, theirs is the recorder's cost
loss       events lost and events doubled while ranks write and store, streamer and redis-server are
           killed at random, `--kills` times; compared one by one with the line files

CPU time and not wall clock is what is measured; a machine that is shared by many costs some of it
all the same (caches, hyperthreads), so `load` lies with each row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.arguments import writable_file
from megascale.events import SCHEMA_VERSION, Header, to_line
from megascale.telemetry.path.line_files import telemetry_folder
from megascale.telemetry.path.local import LocalQueue
from megascale.telemetry.path.queue import Message, Queue
from megascale.telemetry.path.redis_streams import RedisQueue
from megascale.telemetry.path.streamer import Streamer
from megascale.telemetry.store.ingest import Ingest
from megascale.telemetry.store.merging import merge_what_is_due
from megascale.telemetry.store.segments import live_segments, store_folder
from megascale.telemetry.store.writing import StoreWriter
from megascale.telemetry.writer import line_file
from megascale.train.bench.rows import Origin
from tests.telemetry.path.servers import RedisServer
from tests.telemetry.path.test_faults import kill_anything
from tests.telemetry.path.writers import rows_of_files, rows_of_store

RESULTS = Path("benchmarks/results/telemetry.jsonl")
PHASES = (
    "forward",
    "backward",
    "recv_forward",
    "send_forward",
    "recv_backward",
    "send_backward",
    "reduce_gradients",
    "gather_parameters",
    "optimizer",
    "load",
)
Row = dict[str, Any]


def lines_of(rank: int, step: int, random_: random.Random) -> bytes:
    """What a recorder writes of a step that is not sampled."""
    sums = {
        phase: {"total_ns": random_.randrange(10**6, 10**9), "count": 1 + number % 16}
        for number, phase in enumerate(PHASES)
    }
    begin_ns = 10**12 + step * 10**9 + random_.randrange(10**6)
    summed = {"v": SCHEMA_VERSION, "kind": "sum", "rank": rank, "step": step, "sums": sums}
    times = {
        "v": SCHEMA_VERSION,
        "kind": "step",
        "rank": rank,
        "step": step,
        "t0_ns": begin_ns,
        "dur_ns": 10**9 - random_.randrange(10**6),
        "clock": "device",
        "sampled": False,
        "launch_ns": random_.randrange(10**8),
        "issued_ns": begin_ns + random_.randrange(10**8),
    }
    both = (json.dumps(record, separators=(",", ":")) + "\n" for record in (summed, times))
    return "".join(both).encode()


def header_of(rank: int, num_ranks: int) -> bytes:
    place = Header(
        rank=rank,
        world_size=num_ranks,
        tensor=1,
        data=num_ranks,
        pipeline=1,
        tp_rank=0,
        dp_rank=rank,
        pp_rank=0,
        host=f"node{rank // 8:04d}",
        pid=1000 + rank,
        epoch=0,
        unix_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
    )
    return to_line(place).encode()


def ingest(num_ranks: int, steps: int) -> Row:
    """Records a second of a core, from bytes to durable segments."""
    random_ = random.Random(0)
    sources = [f"rank_{rank:05d}.jsonl:{rank}" for rank in range(num_ranks)]
    offsets = [0] * num_ranks
    cpu_s = wall_s = 0.0
    with tempfile.TemporaryDirectory(prefix="megascale-ingest-") as folder:
        writer = StoreWriter(Path(folder))
        for step in range(-1, steps):
            messages = []
            for rank, source in enumerate(sources):
                is_first = step < 0  # Arrow is loaded, phases are met: not counted
                lines = header_of(rank, num_ranks) if is_first else b""
                lines += lines_of(rank, step + 1, random_)
                messages.append(Message(source, rank, offsets[rank], lines))
                offsets[rank] += len(lines)
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            for message in messages:
                writer.admit(message)
            writer.commit()
            if step >= 0:
                cpu_s += time.process_time() - began_cpu_s
                wall_s += time.monotonic() - began_s
        _check_rows(Path(folder), "sums", num_ranks * (steps + 1))
    records = num_ranks * steps * len(PHASES)
    return {
        "case": {"line": "ingest", "of": "sums and steps", "ranks": num_ranks},
        "metric": "records/s a core",
        "value": round(records / cpu_s),
        "target": {"op": ">=", "value": 200_000},
        "records": records,
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(wall_s, 3),
    }


def always_on(num_ranks: int, seconds: int, *, over_redis: bool) -> Row:
    """CPU seconds of the whole path a second of training."""
    random_ = random.Random(1)
    shares = []
    with tempfile.TemporaryDirectory(prefix="megascale-always-on-") as name, ExitStack() as stack:
        run_dir = Path(name)
        telemetry_folder(run_dir).mkdir()
        queues, server_cpu_s = _queues(stack, run_dir, over_redis=over_redis)
        streamer = Streamer(run_dir, queues[0], settle_s=0.0)
        store = Ingest(store_folder(run_dir), queues[1], flush_s=3600.0)
        written = [[lines_of(rank, 0, random_) for _ in range(2)] for rank in range(num_ranks)]
        paths = [str(line_file(run_dir, rank)) for rank in range(num_ranks)]
        for second in range(-2, seconds):
            step = b'"step":%d,' % (second + 2)
            for rank in range(num_ranks):
                with open(paths[rank], "ab") as file:
                    if second == -2:
                        file.write(header_of(rank, num_ranks))
                    file.write(written[rank][second % 2].replace(b'"step":0,', step))
            began_s = time.process_time() + server_cpu_s()
            streamer.turn()  # it looks once a second
            while store.turn(0.0):
                pass
            store.flush()
            merge_what_is_due(store_folder(run_dir))
            if second >= 0:  # before, files are met and Arrow is loaded
                shares.append(time.process_time() + server_cpu_s() - began_s)
        _check_rows(store_folder(run_dir), "sums", num_ranks * (seconds + 2))
        assert store.num_gaps == 0
    return {
        "case": {
            "line": "always on",
            "of": "over redis-server" if over_redis else "in a process",
            "ranks": num_ranks,
        },
        "metric": "share of a core at 1 step/s",
        "value": round(statistics.mean(shares), 4),
        "target": {"op": "<=", "value": 1.0},
        "median": round(statistics.median(shares), 4),
        "max": round(max(shares), 4),
        "seconds": seconds,
    }


def loss(kills: int, seed: int) -> Row:
    """Events lost and doubled while all parts are killed at random."""
    random_ = random.Random(seed)
    victims = random_.choices(["store", "server", "streamer"], k=kills)
    with tempfile.TemporaryDirectory(prefix="megascale-loss-") as name:
        kill_anything(Path(name), seed, victims, appends=False, pause_s=(0.1, 2.0))
        files = rows_of_files(Path(name) / "run")
        stored = rows_of_store(store_folder(Path(name) / "run"))
    lost, doubled = (sum(rows.values()) for rows in (files - stored, stored - files))
    return {
        "case": {"line": "loss", "of": "store, streamer, redis-server killed", "ranks": 6},
        "metric": "events lost or doubled",
        "value": lost + doubled,
        "target": {"op": "<=", "value": 0},
        "lost": lost,
        "doubled": doubled,
        "events": sum(files.values()),
        "kills": {victim: victims.count(victim) for victim in sorted(set(victims))},
        "seed": seed,
    }


def _queues(
    stack: ExitStack, folder: Path, *, over_redis: bool
) -> tuple[tuple[Queue, Queue], Callable[[], float]]:
    """The streamer's and the store's end, and the CPU time of what is between."""
    if not over_redis:
        local = LocalQueue(1 << 30)
        return (local, local), lambda: 0.0
    server = stack.enter_context(RedisServer(folder))
    ends = RedisQueue(server.url), RedisQueue(server.url)
    for end in ends:
        stack.callback(end.close)
    return ends, lambda: _cpu_s(server.pid)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _check_rows(folder: Path, table: str, expected: int) -> None:
    """A row is written only after what was stored has been counted."""
    from pyarrow import parquet

    files = [file for s in live_segments(folder) if (file := s.table(table)) is not None]
    found = sum(parquet.read_metadata(file).num_rows for file in files)
    assert found == expected, (found, expected)
    assert not [s for s in live_segments(folder) if s.table("unreadable")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.telemetry.ingest")
    parser.add_argument("lines", nargs="*", default=["ingest", "always-on", "loss"])
    parser.add_argument("--ranks", type=int, default=12_288)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    given = parser.parse_args()
    work: dict[str, list[Callable[[], Row]]] = {
        "ingest": [lambda: ingest(given.ranks, given.seconds)],
        "always-on": [
            lambda: always_on(given.ranks, given.seconds, over_redis=False),
            lambda: always_on(given.ranks, given.seconds, over_redis=True),
        ],
        "loss": [lambda: loss(given.kills, given.seed)],
    }
    command = f"python -m benchmarks.telemetry.ingest {' '.join(sys.argv[1:])}".strip()
    origin = Origin.here(num_ranks=1, on_gpus=False, command=command, given_commit=None)
    for line in given.lines:
        for measure in work[line]:
            load = round(os.getloadavg()[0], 2)  # of whatever else runs here
            row = measure()
            value, target = row["value"], row["target"]
            met = value >= target["value"] if target["op"] == ">=" else value <= target["value"]
            whole = {"bench": "telemetry", **row, "met": met, "load": load, **origin.now()}
            with given.output.open("a") as file:
                file.write(json.dumps(whole) + "\n")
            told = f"{value} {row['metric']}, {target['op']} {target['value']}"
            print(f"{row['case']['line']}, {row['case']['of']}: {told}: {'yes' if met else 'NO'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
