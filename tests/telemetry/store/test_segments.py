"""Segments, merging and retention: what readers list is every row once, whatever is left behind."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import DataError
from megascale.telemetry.store.merging import (
    MOST_BYTES,
    delete_hidden,
    due,
    merge,
    merge_what_is_due,
)
from megascale.telemetry.store.retention import deleted, retain
from megascale.telemetry.store.segments import (
    Position,
    Segment,
    arrow,
    arrow_schema,
    clean_aside,
    hidden_segments,
    live_segments,
    new_segment,
    next_number,
    remove_segment,
    stored_positions,
    write_segment,
)

AT = {"rank_00000.jsonl:a": Position(10, 0, 1, 5)}


def table(name: str, rows: list[dict[str, Any]], phases: list[str] | None = None) -> Any:
    return arrow().Table.from_pylist(rows, schema=arrow_schema(name, phases or []))


def sums(step: int, phase: str = "forward", ranks: int = 2) -> Any:
    rows = [
        {"rank": rank, "start": 0, "step": step, f"ns:{phase}": step * 10 + rank, f"n:{phase}": 1}
        for rank in range(ranks)
    ]
    return table("sums", rows, [phase])


def rows_of(segments: list[Segment], name: str = "sums") -> list[dict[str, Any]]:
    from pyarrow import parquet

    files = [file for segment in segments if (file := segment.table(name))]
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def test_a_segment_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert live_segments(tmp_path / "none") == []
    path = write_segment(tmp_path, {"sums": sums(3), "spans": table("spans", [])}, AT)
    (segment,) = live_segments(tmp_path)
    assert (segment.path, segment.first, segment.last) == (path, 1, 1)
    assert segment.table("spans") is None
    assert segment.positions() == AT
    assert rows_of([segment]) == sums(3).to_pylist()
    write_segment(tmp_path, {}, {"b": Position(1 << 50, -1)})
    assert stored_positions(live_segments(tmp_path)) == {**AT, "b": Position(1 << 50, -1)}
    assert next_number(tmp_path) == 3


def test_what_is_half_written_is_not_listed_and_the_writer_takes_it_away(tmp_path: Path) -> None:
    write_segment(tmp_path, {"sums": sums(1)}, AT)
    aside = tmp_path / ".aside-000000000002"
    shutil.copytree(live_segments(tmp_path)[0].path, aside)
    (tmp_path / "000000000003").mkdir()  # no positions: somebody else's
    (tmp_path / "something else").mkdir()
    assert [segment.first for segment in live_segments(tmp_path)] == [1]
    with pytest.raises(DataError, match="no room"), new_segment(tmp_path, 9, 9, AT) as left:
        raise OSError(f"no room for {left.name}")
    assert not (tmp_path / ".aside-000000000009").exists()
    assert clean_aside(tmp_path) == 1
    assert not aside.exists()


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    write_segment(tmp_path, {"sums": sums(1)}, AT, number=4)
    with pytest.raises(DataError, match="cannot be written"):
        write_segment(tmp_path, {"sums": sums(2)}, AT, number=4)
    assert rows_of(live_segments(tmp_path)) == sums(1).to_pylist()
    assert clean_aside(tmp_path) == 0


def test_columns_of_other_types_are_ours_to_get_right(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        write_segment(tmp_path, {"sums": arrow().table({"rank": [1], "start": [0]})}, AT)


def test_positions_of_another_version_are_refused(tmp_path: Path) -> None:
    path = write_segment(tmp_path, {"sums": sums(1)}, AT)
    (path / "positions.json").write_text('{"version": 9}')
    with pytest.raises(DataError, match="version 9"):
        stored_positions(live_segments(tmp_path))


def test_a_merged_segment_hides_what_it_covers(tmp_path: Path) -> None:
    for step in range(1, 6):
        phase = "forward" if step != 4 else "backward"
        at = {"a": Position(step, 0), f"s{step}": Position(1, 1)}
        write_segment(tmp_path, {"sums": sums(step, phase)}, at)
    before = rows_of(live_segments(tmp_path))
    path = merge(tmp_path, live_segments(tmp_path)[:4])
    assert path.name == "000000000001-000000000004"
    live = live_segments(tmp_path)
    assert [(segment.first, segment.last) for segment in live] == [(1, 4), (5, 5)]
    merged = [{k: v for k, v in row.items() if v is not None} for row in rows_of(live)]
    assert merged == before
    assert stored_positions(live) == {
        "a": Position(5, 0),
        **{f"s{step}": Position(1, 1) for step in range(1, 6)},
    }
    assert next_number(tmp_path) == 6
    delete_hidden(tmp_path, grace_s=60.0)
    assert len(hidden_segments(tmp_path)) == 4, "a reader that listed before still has them"
    delete_hidden(tmp_path, grace_s=0.0)
    assert hidden_segments(tmp_path) == []
    assert live_segments(tmp_path) == live


@pytest.mark.full
def test_merging_again_and_again_keeps_every_row_and_few_segments(tmp_path: Path) -> None:
    most, rewritten = 0, 0
    for step in range(80):
        write_segment(tmp_path, {"sums": sums(step)}, {"a": Position(step, 0)})
        rewritten += merge_what_is_due(tmp_path, fan=4)
        most = max(most, len(live_segments(tmp_path)))
        delete_hidden(tmp_path, grace_s=0.0)
    assert [row["step"] for row in rows_of(live_segments(tmp_path))[::2]] == list(range(80))
    assert most <= 16
    assert rewritten <= 160
    assert stored_positions(live_segments(tmp_path)) == {"a": Position(79, 0)}


def test_large_segments_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict.fromkeys(range(2, 12), 1 << 20) | {1: MOST_BYTES}
    monkeypatch.setattr(Segment, "num_bytes", property(lambda self: sizes[self.first]))
    segments = [Segment(Path(str(number)), number, number) for number in range(1, 12)]
    assert [segment.first for segment in due(segments)] == list(range(2, 12))
    sizes[11] = MOST_BYTES
    assert due(segments) == []


@pytest.mark.full
def test_readers_see_every_row_once_while_it_is_merged(tmp_path: Path) -> None:
    """Lists and reads as fast as it can while segments are written, merged and deleted."""
    write_segment(tmp_path, {"sums": sums(0)}, AT)
    ended, seen = threading.Event(), list[int]()

    def read() -> None:
        while not ended.is_set():
            steps = [row["step"] for row in rows_of(live_segments(tmp_path))[::2]]
            assert steps == list(range(len(steps))), steps
            seen.append(len(steps))

    errors = list[BaseException]()

    def guarded() -> None:
        try:
            read()
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            errors.append(error)

    reader = threading.Thread(target=guarded)
    reader.start()
    for step in range(1, 40):
        write_segment(tmp_path, {"sums": sums(step)}, AT)
        merge_what_is_due(tmp_path, fan=3)
        delete_hidden(tmp_path, grace_s=0.5)
    ended.set()
    reader.join(10.0)
    assert not errors
    assert seen == sorted(seen)
    assert len(seen) > 3


def test_a_segment_that_goes_while_it_is_listed(tmp_path: Path) -> None:
    for step in (1, 2):
        write_segment(tmp_path, {"sums": sums(step)}, AT)
    first, second = live_segments(tmp_path)
    remove_segment(first)
    assert live_segments(tmp_path) == [second]
    assert first.table("sums") is None
    assert first.num_bytes == 0
    with pytest.raises(DataError, match="list again"):
        first.positions()


# ------------------------------------------------------------ retention


def _store(folder: Path) -> None:
    """Three segments of a step each, with spans, ports, sums and ranks."""
    for step in (1, 2, 3):
        spans = [
            {"rank": 0, "start": 0, "step": step, "name": f"s{i}", "dur_ns": i} for i in range(3000)
        ]
        ports = [{"rank": -1, "start": 0, "t_ns": i, "port": "eth0"} for i in range(500)]
        tables = {
            "sums": sums(step, ranks=400),
            "spans": table("spans", spans),
            "counters": table("counters", ports),
            "ranks": table("ranks", [{"rank": 0, "start": step}]),
            "incidents": table("incidents", [{"rank": 0, "start": 0, "step": step, "name": "x"}]),
        }
        write_segment(folder, tables, {"a": Position(step, 0)})


def _tables(folder: Path) -> list[list[str]]:
    names = ("spans", "counters", "sums", "ranks", "incidents")
    return [[n for n in names if s.table(n)] for s in live_segments(folder)]


def _size(folder: Path) -> int:
    return sum(segment.num_bytes for segment in live_segments(folder))


def test_spans_of_the_oldest_steps_go_first(tmp_path: Path) -> None:
    _store(tmp_path)
    everything = _size(tmp_path)
    assert retain(tmp_path, keep_bytes=everything, keep_s=1e9, now_s=time.time()) == []
    (gone,) = retain(tmp_path, keep_bytes=everything - 1, keep_s=1e9, now_s=50.0)
    assert (gone.table, gone.segment, gone.first_step, gone.last_step) == (
        "spans",
        "000000000001",
        1,
        1,
    )
    assert (gone.why, gone.unix_s) == ("size", 50.0)
    assert gone.num_bytes == everything - _size(tmp_path)
    kept = ["sums", "ranks", "incidents"]
    spans, ports = live_segments(tmp_path)[1].table("spans"), live_segments(tmp_path)[0].path
    assert spans is not None
    two_more = 2 * spans.stat().st_size + (ports / "counters.parquet").stat().st_size
    more = retain(tmp_path, keep_bytes=_size(tmp_path) - two_more + 1, keep_s=1e9, now_s=51.0)
    assert [one.table for one in more] == ["spans", "spans", "counters"]
    assert _tables(tmp_path) == [kept, ["counters", *kept], ["counters", *kept]]
    assert deleted(tmp_path) == [gone, *more]


def test_sums_go_last_and_ranks_incidents_and_positions_stay(tmp_path: Path) -> None:
    _store(tmp_path)
    gone = retain(tmp_path, keep_bytes=0, keep_s=1e9, now_s=time.time())
    assert [one.table for one in gone] == ["spans"] * 3 + ["counters"] * 3 + ["sums"] * 3
    assert [one.first_step for one in gone] == [1, 2, 3, None, None, None, 1, 2, 3]
    assert _tables(tmp_path) == [["ranks", "incidents"]] * 3
    assert stored_positions(live_segments(tmp_path)) == {"a": Position(3, 0)}


def test_what_is_too_old_goes_whatever_its_size(tmp_path: Path) -> None:
    _store(tmp_path)
    oldest = live_segments(tmp_path)[0].path
    os.utime(oldest, (1000.0, 1000.0))
    now_s = time.time()
    gone = retain(tmp_path, keep_bytes=1e12, keep_s=3600.0, now_s=now_s)
    assert {(one.segment, one.why) for one in gone} == {("000000000001", "age")}
    kept = ["spans", "counters", "sums", "ranks", "incidents"]
    assert _tables(tmp_path) == [["ranks", "incidents"], kept, kept]
    assert deleted(tmp_path / "none") == []
    merged = merge(tmp_path, live_segments(tmp_path))
    assert merged.exists(), "segments with and without a table merge"
