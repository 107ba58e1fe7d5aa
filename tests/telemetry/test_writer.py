"""The line file: complete, bounded, and never in the loop's way."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from megascale.errors import DataError
from megascale.events import Dropped, Event, Incident, Span, parse_line, read_events
from megascale.telemetry import writer as writer_module
from megascale.telemetry.writer import LineWriter, line_file


def span(number: int) -> Span:
    return Span(rank=0, name="forward", t0_ns=number, dur_ns=1, clock="host")


@pytest.mark.full
def test_all_events_in_order_after_close(tmp_path: Path) -> None:
    path = line_file(tmp_path, 3)
    assert path == tmp_path / "telemetry" / "rank_00003.jsonl"
    events = [span(n) for n in range(10_000)]
    with LineWriter(path) as writer:
        for event in events:
            writer(event)
    assert list(read_events(path)) == events
    assert writer.num_dropped == 0
    writer.close()  # again: nothing happens


def test_lines_arrive_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with LineWriter(path, flush_interval_s=0.01) as writer:
        writer(span(1))
        deadline = time.monotonic() + 10
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.005)
        assert list(read_events(path)) == [span(1)]


class SlowDisk(LineWriter):
    """A file system that takes nothing until `let_go`."""

    let_go = threading.Event()
    busy = threading.Event()

    def _write(self, data: bytes) -> None:
        self.busy.set()
        self.let_go.wait(30)
        super()._write(data)


def test_a_full_buffer_drops_counts_and_does_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    writer = SlowDisk(path, rank=7, buffer_events=100, flush_interval_s=0.001)
    writer(span(0))
    assert writer.busy.wait(10)  # the thread holds event 0
    start = time.monotonic()
    for number in range(1, 1001):
        writer(span(number))
    assert time.monotonic() - start < 1.0
    assert writer.num_dropped == 900
    writer.let_go.set()
    writer.close()
    kept: list[Event] = [span(n) for n in range(101)]
    assert list(read_events(path)) == [*kept, Dropped(rank=7, where="writer", count=900)]
    writer(span(5))
    assert writer.num_dropped == 901


def test_close_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(SlowDisk):
        let_go = threading.Event()
        busy = threading.Event()

    monkeypatch.setattr(writer_module, "_CLOSE_TIMEOUT_S", 0.1)
    writer = Stuck(tmp_path / "lines", flush_interval_s=0.001)
    writer(span(0))
    assert writer.busy.wait(10)
    writer(span(1))
    writer.close()
    assert "did not take its last lines in 0 s; 1 events are lost" in caplog.text
    writer.let_go.set()
    writer._thread.join(10)


class FullDisk(LineWriter):
    """Half of a write fits on the disk, once."""

    full = True

    def _write(self, data: bytes) -> None:
        if self.full:
            self.full = False
            os.write(self._descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(data)


def test_a_full_disk_leaves_whole_lines_and_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines"
    with caplog.at_level(logging.WARNING), FullDisk(path, flush_interval_s=60) as writer:
        for number in range(3):
            writer(span(number))
        writer.flush()
        assert path.read_bytes() == b""
        writer(span(3))
    assert list(read_events(path)) == [span(3), Dropped(rank=0, where="writer", count=3)]
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text


def test_an_event_that_is_no_json_is_dropped_alone(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with LineWriter(path, flush_interval_s=60) as writer:
        writer(Incident(rank=0, name="error", t_ns=1, detail={"what": object()}))
        writer(span(1))
    assert list(read_events(path)) == [span(1), Dropped(rank=0, where="writer", count=1)]


@pytest.mark.parametrize("torn", ["", '{"v":1,"kind":"sp', "x" * 10_000])
def test_a_torn_line_is_cut_off_on_opening(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "lines"
    with LineWriter(path) as writer:
        writer(span(1))
    with path.open("a") as file:
        file.write(torn)
    with LineWriter(path) as writer:
        writer(span(2))
    assert list(read_events(path)) == [span(1), span(2)]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("y" * 5000)
    LineWriter(path).close()
    assert path.read_bytes() == b""


def _write_until_killed(path: Path) -> None:
    writer = LineWriter(path, buffer_events=10_000, flush_interval_s=0.001)
    number = 0
    while True:
        writer(span(number))
        number += 1


@pytest.mark.full
def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    process = multiprocessing.get_context("spawn").Process(target=_write_until_killed, args=(path,))
    process.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 100_000):
        time.sleep(0.01)
    process.kill()
    process.join()
    *whole, rest = path.read_bytes().split(b"\n")
    assert len(whole) > 500
    for line in whole:
        parse_line(line)
    if rest:
        with pytest.raises(DataError):
            parse_line(rest)
