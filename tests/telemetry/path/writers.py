"""Ranks that write, and what the store must have in the end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

from megascale.events import Event, Header, Incident, Span, Step, Sums, read_events, to_line
from megascale.telemetry.path.line_files import list_line_files, telemetry_folder
from megascale.telemetry.store.segments import live_segments, store_folder, stored_positions
from megascale.telemetry.writer import line_file

Rows = Counter[tuple[object, ...]]


def header(rank: int, world_size: int = 8, *, epoch: int = 0) -> Header:
    return Header(
        rank=rank,
        world_size=world_size,
        tensor=1,
        data=world_size,
        pipeline=1,
        tp_rank=0,
        dp_rank=rank,
        pp_rank=0,
        host=f"host{rank // 4}",
        pid=100 + rank,
        epoch=epoch,
        unix_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
    )


def step_lines(rank: int, step: int, *, phases: int = 3, spans: int = 0) -> str:
    """What a recorder writes of one step."""
    sums = {
        f"phase{i}": {"total_ns": 1000 * step + rank + i, "count": i + 1} for i in range(phases)
    }
    spans_of_step = [
        Span(
            rank=rank,
            name="forward",
            t0_ns=step * 1000 + i,
            dur_ns=7,
            clock="host",
            step=step,
            seq=i,
        )
        for i in range(spans)
    ]
    times = Step(rank=rank, step=step, t0_ns=step, dur_ns=9, clock="host", sampled=spans > 0)
    written: list[Event] = [*spans_of_step, Sums(rank=rank, step=step, sums=sums), times]
    return "".join([to_line(event) for event in written])


class Writers(threading.Thread):
    """Ranks that append, now and then a piece of a line, and start again now and then."""

    def __init__(self, run_dir: Path, num_ranks: int, random_: random.Random) -> None:
        super().__init__(daemon=True)
        self._run_dir, self._num_ranks, self._random = run_dir, num_ranks, random_
        self._ended = threading.Event()
        telemetry_folder(run_dir).mkdir(parents=True, exist_ok=True)

    def end(self) -> None:
        self._ended.set()
        self.join(10.0)
        assert not self.is_alive()

    def run(self) -> None:
        files = [
            os.open(line_file(self._run_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for rank in range(self._num_ranks)
        ]
        step = 0
        while not self._ended.wait(0.005):
            for rank, file in enumerate(files):
                text = step_lines(rank, step, spans=3 * (step % 10 == 0))
                if step == 0 or self._random.random() < 0.01:
                    text = to_line(header(rank, self._num_ranks, epoch=step)) + text
                if self._random.random() < 0.05:
                    text += to_line(Incident(rank=rank, name="rare", t_ns=step, step=step))
                cut = self._random.randrange(len(text))
                os.write(file, text[:cut].encode())
                os.write(file, text[cut:].encode())
            step += 1
        for file in files:
            os.close(file)


def wait_until_stored(run_dir: Path, timeout_s: float) -> None:
    """Until the store has all bytes of all files."""
    give_up_s = time.monotonic() + timeout_s
    folder = telemetry_folder(run_dir)
    while True:
        size = sum((folder / name).stat().st_size for name in list_line_files(run_dir))
        positions = stored_positions(live_segments(store_folder(run_dir)))
        stored = sum(position.offset for position in positions.values())
        if stored == size:
            return
        assert time.monotonic() < give_up_s, f"{stored} of {size} bytes stored: {positions}"
        time.sleep(0.05)


def rows_of_files(run_dir: Path) -> Rows:
    """Every event of the line files, by what identifies it."""
    rows: Rows = Counter()
    for name, rank in list_line_files(run_dir).items():
        start = -1
        for event in read_events(telemetry_folder(run_dir) / name):
            match event:
                case Header():
                    start += 1
                    rows["ranks", rank, start, event.epoch] += 1
                case Sums():
                    total_ns = sum(times["total_ns"] for times in event.sums.values())
                    rows["sums", rank, start, event.step, total_ns] += 1
                case Step():
                    rows["steps", rank, start, event.step, event.dur_ns] += 1
                case Span():
                    rows["spans", rank, start, event.step, event.seq] += 1
                case Incident():
                    rows["incidents", rank, start, event.step, event.name] += 1
    return rows


def rows_of_store(folder: Path) -> Rows:
    """The same of the store's rows."""
    from pyarrow import parquet

    rows: Rows = Counter()
    last = {"ranks": "epoch", "steps": "dur_ns", "spans": "seq", "incidents": "name"}
    for segment in live_segments(folder):
        assert segment.table("unreadable") is None
        for table in ("ranks", "sums", "steps", "spans", "incidents"):
            file = segment.table(table)
            for row in parquet.read_table(file).to_pylist() if file else []:
                where: tuple[object, ...] = (table, row["rank"], row["start"])
                if table == "sums":
                    times = [v for k, v in row.items() if k.startswith("ns:") and v is not None]
                    rows[*where, row["step"], sum(times)] += 1
                elif table == "ranks":
                    rows[*where, row["epoch"]] += 1
                else:
                    rows[*where, row["step"], row[last[table]]] += 1
    return rows
