"""Event lines survive the round trip; the progress page never shows a mix of two records."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale import events
from megascale.errors import DataError
from megascale.events import (
    Anchor,
    Completed,
    Dropped,
    Event,
    Incident,
    Issued,
    ProgressReader,
    ProgressWriter,
    Span,
    Step,
    Sums,
    decode_issued,
    group_id,
    issued_stores,
    pack_completed,
    parse_line,
    read_events,
    run_header,
    to_line,
    unpack_completed,
)
from megascale.topology import Mesh

HEADER = run_header(Mesh(2, 2, 2), 5, host="node1", epoch=3, versions={"torch": "2.13.0"})
SPAN = Span(
    rank=5,
    step=10,
    name="grad_sync",
    t0_ns=123,
    dur_ns=45,
    clock="device",
    stream="data",
    chunk=1,
    op="reduce_scatter",
    group="data.1",
    seq=7,
    num_bytes=4096,
)
EVENTS: list[Event] = [
    HEADER,
    SPAN,
    Span(rank=0, name="load", t0_ns=1, dur_ns=2, clock="host"),
    Sums(rank=5, step=10, sums={"forward": {"total_ns": 81, "count": 8}}),
    Step(rank=5, step=10, t0_ns=1, dur_ns=100, clock="device", sampled=True),
    Incident(rank=5, step=10, name="checkpoint", t_ns=9, detail={"path": "step-10"}),
    Anchor(rank=5, clock="device", t_ns=7, reading_ns=3, error_ns=1, drift_ppm=-2.5),
    Dropped(rank=5, where="writer", count=12),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_round_trip(event: Event) -> None:
    line = to_line(event)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert parse_line(line) == event


def test_a_line_has_exactly_the_known_values() -> None:
    assert json.loads(to_line(SPAN)) == {
        "v": 1,
        "kind": "span",
        "rank": 5,
        "name": "grad_sync",
        "t0_ns": 123,
        "dur_ns": 45,
        "clock": "device",
        "stream": "data",
        "step": 10,
        "chunk": 1,
        "op": "reduce_scatter",
        "group": "data.1",
        "seq": 7,
        "num_bytes": 4096,
    }


def test_header_carries_the_coordinates() -> None:
    assert (HEADER.tp_rank, HEADER.dp_rank, HEADER.pp_rank, HEADER.world_size) == (1, 0, 1, 8)
    assert HEADER.pid == os.getpid()


def test_non_finite_values_of_an_incident_stay_valid_json() -> None:
    line = to_line(Incident(rank=0, name="nonfinite", t_ns=1, detail={"grad_norm": float("nan")}))
    assert json.loads(line, parse_constant=pytest.fail)["detail"] == {"grad_norm": "nan"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not an event line"),
        ("[1]", "not an event line"),
        ('{"kind":"span"}', "not an event line"),
        ('{"v":2,"kind":"span"}', "schema version 2, kind 'span'; this program reads version 1"),
        ('{"v":1,"kind":"spam"}', "kind 'spam'"),
        ('{"v":1,"kind":"dropped","rank":0}', "has other fields"),
        ('{"v":1,"kind":"dropped","rank":0,"where":"w","count":1,"x":1}', "has other fields"),
    ],
)
def test_other_lines_are_refused(line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_line(line)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    text = "".join(map(to_line, EVENTS))
    path.write_text(text[:-5])
    assert list(read_events(path)) == EVENTS[:-1]


OLD = Issued(3, 41, "forward", 10**15, chunk=1, micro_batch=2, group_id=group_id("a"), seq=9)
NEW = Issued(3, 42, "optimizer", 10**15 + 77)


def page_of(record: Issued, sequence: int = 0) -> bytearray:
    page = bytearray(events.PAGE_BYTES)
    for offset, data in issued_stores(sequence, record):
        page[offset : offset + len(data)] = data
    return page


def words(stores: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The same stores, cut into the 4-byte words that can become visible one by one."""
    return [
        (offset + i, data[i : i + 4]) for offset, data in stores for i in range(0, len(data), 4)
    ]


def test_documented_offsets() -> None:
    page = bytes(page_of(OLD))
    assert int.from_bytes(page[0:4], "little") == 2
    assert page[8:12] == b"MSP1"
    values = {12: (4, 3), 16: (8, 10**15), 24: (4, 41), 28: (2, 4), 30: (2, 1), 32: (4, 2)}
    values |= {36: (4, group_id("a")), 40: (4, 9), 44: (4, 0), 48: (8, 0), 56: (8, 0)}
    for offset, (size, value) in values.items():
        assert int.from_bytes(page[offset : offset + size], "little") == value, offset


def test_every_moment_of_a_write_shows_the_old_record_the_new_one_or_none() -> None:
    page = page_of(OLD)
    stores = words(issued_stores(2, NEW))
    seen = [decode_issued(bytes(page))]
    for offset, data in stores:
        page[offset : offset + 4] = data
        seen.append(decode_issued(bytes(page)))
    assert seen == [OLD] + [None] * len(stores[:-1]) + [NEW]


@settings(max_examples=300, deadline=None)
@given(st.sets(st.integers(0, 12)))
def test_stores_that_become_visible_in_any_order_never_mix(visible: set[int]) -> None:
    page = page_of(OLD)
    stores = words(issued_stores(2, NEW))
    assert len(stores) == 13
    for index in sorted(visible):
        offset, data = stores[index]
        page[offset : offset + 4] = data
    assert decode_issued(bytes(page)) in (OLD, NEW, None)


def test_reader_keeps_the_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "page"
    writer = ProgressWriter(path)
    reader = ProgressReader(path)
    assert path.stat().st_size == 64
    assert (reader.issued(), reader.completed()) == (None, None)
    writer.issued(OLD)
    assert reader.issued() == OLD
    # The writer dies in the middle of the next record; a restarted one writes over it.
    for offset, data in issued_stores(2, NEW)[:-1]:
        writer._map[offset : offset + len(data)] = data
    assert decode_issued(writer._map[0:64]) is None
    assert reader.issued() == OLD
    writer.close()
    restarted = ProgressWriter(path)
    restarted.issued(NEW)
    assert reader.issued() == NEW
    restarted.close()
    reader.close()


def test_sequence_wraps() -> None:
    assert decode_issued(bytes(page_of(NEW, sequence=0xFFFFFFFE))) == NEW
    assert decode_issued(bytes(page_of(NEW, sequence=0xFFFFFFFF))) == NEW


@pytest.mark.parametrize(
    "record",
    [Completed(0, "other", 0, 0), Completed(2**32 - 1, "done"), Completed(7, "backward", 11, 191)],
)
def test_completed_round_trip(tmp_path: Path, record: Completed) -> None:
    assert 0 < pack_completed(record) < 2**64
    assert unpack_completed(pack_completed(record)) == record
    writer, reader = ProgressWriter(tmp_path / "page"), ProgressReader(tmp_path / "page")
    writer.completed(record)
    assert reader.completed() == record
    assert reader.issued() is None


def _write_for_ever(path: Path) -> None:
    writer = ProgressWriter(path)
    for number in itertools.count(1):
        writer.issued(Issued(number, number, "forward", number, micro_batch=number, seq=number))


def test_a_busy_writer_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(64))
    reader = ProgressReader(path)
    process = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(path,))
    process.start()
    try:
        seen: set[int | None] = set()
        while len(seen) < 200:
            record = reader.issued()
            if record is not None:
                fields = {record.epoch, record.step, record.monotonic_ns, record.micro_batch}
                assert len(fields) == 1, record
                seen |= fields
    finally:
        process.kill()
        process.join()
