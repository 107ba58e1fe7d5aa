"""Streamer, queue in the process and store, turn by turn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megascale.config import TelemetryConfig
from megascale.errors import ConfigError, DataError
from megascale.events import to_line
from megascale.telemetry.path.command import Stream, telemetry_config
from megascale.telemetry.path.line_files import telemetry_folder
from megascale.telemetry.path.local import LocalQueue
from megascale.telemetry.path.queue import CUT, Message, QueueError
from megascale.telemetry.path.streamer import Streamer
from megascale.telemetry.store import writing
from megascale.telemetry.store.ingest import Ingest
from megascale.telemetry.store.segments import live_segments, store_folder
from megascale.telemetry.store.writing import Admitted, StoreWriter
from megascale.telemetry.writer import line_file
from tests.telemetry.path.writers import header, rows_of_files, rows_of_store, step_lines


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    telemetry_folder(tmp_path).mkdir()
    return tmp_path


def write(
    run_dir: Path, steps: range, ranks: Sequence[int] = (0, 1), *, first: bool = False
) -> None:
    for rank in ranks:
        with line_file(run_dir, rank).open("a") as file:
            if first:
                file.write(to_line(header(rank)))
            file.writelines(step_lines(rank, step) for step in steps)


def ingest(run_dir: Path, queue: LocalQueue) -> Ingest:
    return Ingest(store_folder(run_dir), queue, flush_s=0.0)


def check(run_dir: Path) -> None:
    assert rows_of_store(store_folder(run_dir)) == rows_of_files(run_dir)


def drain(streamer: Streamer, store: Ingest) -> None:
    store.turn(0.0)
    while streamer.turn() + store.turn(0.0):
        pass
    store.finish()


def test_what_is_written_is_stored_and_goes_on(run_dir: Path) -> None:
    queue = LocalQueue()
    streamer, store = Streamer(run_dir, queue, settle_s=0.0), ingest(run_dir, queue)
    assert streamer.turn() == 0, "no file yet"
    write(run_dir, range(3), first=True)
    drain(streamer, store)
    check(run_dir)
    write(run_dir, range(3, 5))
    write(run_dir, range(2), ranks=[7], first=True)
    drain(streamer, store)
    check(run_dir)
    assert store.num_known == store.num_gaps == 0
    assert streamer.turn() == 0


def test_a_new_streamer_goes_on_where_the_store_is(run_dir: Path) -> None:
    queue = LocalQueue()
    store = ingest(run_dir, queue)
    write(run_dir, range(3), first=True)
    drain(Streamer(run_dir, queue), store)
    write(run_dir, range(3, 4))
    streamer = Streamer(run_dir, queue)
    drain(streamer, store)
    new = sum(len(step_lines(rank, 3)) for rank in (0, 1))
    assert streamer.num_bytes == new
    assert store.num_known == 0
    check(run_dir)


def test_a_store_that_starts_again_passes_over_what_it_has(run_dir: Path) -> None:
    queue = LocalQueue()
    write(run_dir, range(3), first=True)
    first = ingest(run_dir, queue)
    first.turn(0.0)
    Streamer(run_dir, queue).turn()
    deliveries = queue.take(10, 0.0)
    queue.close()  # the consumer dies: they come again
    assert len(deliveries) == 2
    first.turn(0.0)
    for delivery in deliveries:
        queue.publish([delivery.message])
    second = ingest(run_dir, queue)
    second.finish()
    assert second.num_known == 2
    check(run_dir)


def test_a_queue_that_lost_everything_is_filled_again(run_dir: Path) -> None:
    queue = _Forgetful()
    streamer, store = Streamer(run_dir, queue, settle_s=0.0), ingest(run_dir, queue)
    write(run_dir, range(3), first=True)
    drain(streamer, store)
    write(run_dir, range(3, 6))
    streamer.turn()
    queue.forget()
    write(run_dir, range(6, 7))
    store.turn(0.0)  # says how far it is
    drain(streamer, store)
    check(run_dir)
    assert store.num_gaps == 0


def test_a_gap_is_refused_and_asked_for_again(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = LocalQueue()
    streamer, store = Streamer(run_dir, queue, settle_s=0.0), ingest(run_dir, queue)
    write(run_dir, range(3), first=True)
    store.turn(0.0)
    streamer.turn()
    queue.done(queue.take(10, 0.0))  # lost, and nobody knows
    write(run_dir, range(3, 6))
    streamer.turn()
    with caplog.at_level(logging.WARNING):
        store.turn(0.0)
    assert "go back" in caplog.text
    assert store.num_gaps == 2
    assert rows_of_store(store_folder(run_dir)) == {}
    drain(streamer, store)
    check(run_dir)


def test_an_empty_store_is_filled_whatever_another_said(run_dir: Path) -> None:
    queue = LocalQueue()
    streamer = Streamer(run_dir, queue, settle_s=0.0)
    write(run_dir, range(3), first=True)
    drain(streamer, ingest(run_dir, queue))
    elsewhere = run_dir / "other"
    drain(streamer, Ingest(elsewhere, queue, flush_s=0.0))
    assert rows_of_store(elsewhere) == rows_of_files(run_dir)


def test_a_full_queue_leaves_the_rest_in_the_files(run_dir: Path) -> None:
    queue = LocalQueue(most_bytes=1000)
    streamer, store = Streamer(run_dir, queue, settle_s=0.0), ingest(run_dir, queue)
    store.turn(0.0)
    write(run_dir, range(20), ranks=range(5), first=True)
    assert streamer.turn() > 0
    before = streamer.num_bytes
    assert streamer.turn() == 0
    drain(streamer, store)
    assert streamer.num_bytes > before
    check(run_dir)


def test_a_queue_that_fails_is_tried_again_from_the_same_place(run_dir: Path) -> None:
    queue = _Failing()
    streamer, store = Streamer(run_dir, queue, settle_s=0.0), ingest(run_dir, queue)
    store.turn(0.0)
    write(run_dir, range(3), first=True)
    queue.fails = True
    with pytest.raises(QueueError):
        streamer.turn()
    queue.fails = False
    drain(streamer, store)
    check(run_dir)


def test_run_tells_a_failure_once_and_ends_when_asked(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = _Failing()
    queue.fails = True
    write(run_dir, range(3), first=True)
    streamer, ended = Streamer(run_dir, queue, settle_s=0.0), threading.Event()
    thread = threading.Thread(target=streamer.run, args=(ended, 0.01))
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join(0.1)
    assert caplog.text.count("sent later") == 1
    queue.fails = False
    ended.set()
    thread.join(5.0)
    store = ingest(run_dir, queue)
    store.turn(0.0)
    drain(Streamer(run_dir, queue, settle_s=0.0), store)
    check(run_dir)


def test_only_the_ranks_of_the_node_and_the_nodes_own(run_dir: Path) -> None:
    queue = LocalQueue()
    write(run_dir, range(2), ranks=range(4), first=True)
    (telemetry_folder(run_dir) / "node_a.jsonl").write_text(to_line(replace(header(0), rank=-1)))
    streamer = Streamer(run_dir, queue, ranks=[1])
    streamer.turn()
    assert {d.message.rank for d in queue.take(10, 0.0)} == {1, -1}
    streamer.follow([3])
    streamer.turn()
    assert {d.message.rank for d in queue.take(10, 0.0)} == {3}


def test_messages_that_overlap_are_cut(tmp_path: Path) -> None:
    lines = [to_line(header(0)).encode(), step_lines(0, 1).encode(), step_lines(0, 2).encode()]
    size = [len(line) for line in lines]
    writer = StoreWriter(tmp_path)
    source = "rank_00000.jsonl:a"
    assert writer.admit(Message(source, 0, 0, lines[0] + lines[1])) is Admitted.TAKEN
    assert writer.admit(Message(source, 0, 0, lines[0])) is Admitted.KNOWN
    assert writer.admit(Message(source, 0, size[0] + size[1] + 1, lines[2])) is Admitted.GAP
    assert writer.admit(Message(source, 0, size[0], lines[1] + lines[2])) is Admitted.TAKEN
    assert writer.commit() == {source: sum(size)}
    assert writer.commit() == {}
    again = StoreWriter(tmp_path)
    assert again.stored() == {source: sum(size)}
    assert again.admit(Message(source, 0, sum(size) - 1, b"\n")) is Admitted.KNOWN
    cut = CUT + size[0]
    assert again.admit(Message(source, 0, cut, lines[2])) is Admitted.TAKEN, "behind a cut"
    assert again.commit() == {source: cut + size[2]}
    assert sum(rows_of_store(tmp_path).values()) == 7


def test_a_disk_that_refuses_loses_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LocalQueue()
    streamer, store = Streamer(run_dir, queue, settle_s=0.0), ingest(run_dir, queue)
    store.turn(0.0)
    write(run_dir, range(3), first=True)
    streamer.turn()

    def refusing(*_: object, **__: object) -> None:
        raise DataError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_segment", refusing)
        with pytest.raises(DataError):
            store.turn(0.0)
    drain(streamer, store)
    check(run_dir)
    assert store.num_known == 0


@pytest.mark.full
def test_stream_in_one_process_until_it_is_ended(run_dir: Path) -> None:
    write(run_dir, range(3), first=True)
    stream = Stream(run_dir, TelemetryConfig())
    timer = threading.Timer(0.3, stream.end)
    timer.start()
    done = stream.run()
    timer.join()
    assert done.num_bytes == sum(
        f.stat().st_size for f in telemetry_folder(run_dir).glob("*.jsonl")
    )
    assert done.num_segments == len(live_segments(store_folder(run_dir)))
    check(run_dir)


def test_what_stream_refuses(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--queue"):
        Stream(run_dir, TelemetryConfig(), stores=False)
    with pytest.raises(DataError, match="no folder"):
        Stream(run_dir / "none", TelemetryConfig())
    with pytest.raises(ConfigError, match="kafka://HOST:PORT/TOPIC"):
        Stream(run_dir, telemetry_config(run_dir, "amqp://here"))
    assert telemetry_config(run_dir).queue == ""


class _Forgetful(LocalQueue):
    """A server without a disk."""

    def forget(self) -> None:
        self.done(self.take(1000, 0.0))
        self.ask_again()


class _Failing(LocalQueue):
    fails = False

    def publish(self, messages: Sequence[Message]) -> int:
        if self.fails:
            raise QueueError("down")
        return super().publish(messages)

    def commit(self, positions: Mapping[str, int]) -> None:
        if self.fails:
            raise QueueError("down")
        super().commit(positions)
