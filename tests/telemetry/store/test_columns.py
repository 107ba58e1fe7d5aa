"""Lines to rows: what was written comes out as written, and what cannot be read is counted."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.events import (
    Anchor,
    Counters,
    Dropped,
    Event,
    Incident,
    Ongoing,
    Span,
    Step,
    Sums,
    to_line,
)
from megascale.telemetry.path.queue import Message
from megascale.telemetry.store.columns import Columns, Converted
from megascale.telemetry.store.odd_lines import MOST_PHASES
from megascale.telemetry.store.segments import Position, arrow_schema
from tests.telemetry.path.writers import header

SOURCE = "rank_00003.jsonl:ab"
SHIFT_NS = 10**18
AT = Position(0, 3, num_headers=1, shift_ns=SHIFT_NS)
PORT = Counters(
    rank=3, host="h", port="p", t_ns=1, sent_bytes=1, received_bytes=1, speed_bytes_per_s=2.5
)
STEP = Step(rank=3, step=5, t0_ns=1000, dur_ns=9, clock="device", sampled=True, issued_ns=900)
SUMS = Sums(rank=3, step=5, sums={"forward": {"total_ns": 81, "count": 8}})


def convert(lines: bytes, at: Position = AT, columns: Columns | None = None) -> Converted:
    message = Message(SOURCE, at.rank, at.offset, lines)
    return (columns or Columns()).convert([message], {SOURCE: at})


def rows(found: Converted, table: str) -> list[dict[str, Any]]:
    """Rows without what is null."""
    if table not in found.tables:
        return []
    return [
        {name: value for name, value in row.items() if value is not None}
        for row in found.tables[table].to_pylist()
    ]


def lines(*events: Event) -> bytes:
    return "".join([to_line(event) for event in events]).encode()


def reasons(found: Converted) -> dict[str, int]:
    counts = Counter[str]()
    for row in rows(found, "unreadable"):
        counts[row["why"]] += row["count"]
    return dict(counts)


def test_every_kind_has_its_row_in_wall_time() -> None:
    found = convert(
        lines(
            STEP,
            SUMS,
            Span(rank=3, name="send", t0_ns=5, dur_ns=2, clock="host", step=5, peer=4, seq=7),
            Ongoing(rank=3, t_ns=6, waited_ns=4, name="reduce", peers=[1, 2]),
            Incident(rank=3, name="nonfinite", t_ns=7, detail={"loss": float("nan")}),
            Anchor(rank=3, clock="device", t_ns=8, reading_ns=80, error_ns=1, drift_ppm=0.5),
            Dropped(rank=3, where="writer", count=2),
            Counters(rank=3, host="h", port="eth0", t_ns=9, sent_bytes=1, received_bytes=2),
        )
    )
    own = {"rank": 3, "start": 0}
    assert rows(found, "steps") == [
        {
            **own,
            "step": 5,
            "t0_ns": SHIFT_NS + 1000,
            "dur_ns": 9,
            "clock": "device",
            "sampled": True,
            "issued_ns": SHIFT_NS + 900,
        }
    ]
    assert rows(found, "sums") == [{**own, "step": 5, "ns:forward": 81, "n:forward": 8}]
    (span,) = rows(found, "spans")
    assert (span["t0_ns"], span["peer"], span["seq"]) == (SHIFT_NS + 5, 4, 7)
    assert span["stream"] == "compute"
    (ongoing,) = rows(found, "ongoing")
    assert (ongoing["t_ns"], json.loads(ongoing["peers"])) == (SHIFT_NS + 6, [1, 2])
    (incident,) = rows(found, "incidents")
    assert (incident["t_ns"], json.loads(incident["detail"])) == (SHIFT_NS + 7, {"loss": "nan"})
    (anchor,) = rows(found, "anchors")
    assert (anchor["t_ns"], anchor["reading_ns"], anchor["drift_ppm"]) == (SHIFT_NS + 8, 80, 0.5)
    assert rows(found, "dropped") == [{**own, "where": "writer", "count": 2}]
    (port,) = rows(found, "counters")
    assert (port["t_ns"], port["sent_bytes"], port["received_bytes"]) == (SHIFT_NS + 9, 1, 2)
    assert "unreadable" not in found.tables
    for name, table in found.tables.items():
        assert table.schema == arrow_schema(name, ["forward"] if name == "sums" else [])


def test_a_header_changes_start_and_clock_in_the_middle() -> None:
    first, second = header(3), header(3, epoch=4)
    data = lines(STEP, first, STEP, second, STEP, SUMS)
    found = convert(data, Position(0, 3))
    starts = [(row["start"], row.get("t0_ns")) for row in rows(found, "steps")]
    shifts = [head.unix_ns - head.monotonic_ns for head in (first, second)]
    assert starts == [(0, None), (0, shifts[0] + 1000), (1, shifts[1] + 1000)]
    assert [row["start"] for row in rows(found, "sums")] == [1]
    assert [(row["start"], row["epoch"]) for row in rows(found, "ranks")] == [(0, 0), (1, 4)]
    assert found.positions == {SOURCE: Position(len(data), 3, 2, shifts[1])}


def test_messages_of_a_source_go_on_where_the_one_before_ended() -> None:
    head = header(3)
    parts = [lines(head), lines(STEP), b"", lines(SUMS)]
    messages, offset = [], 0
    for part in parts:
        messages.append(Message(SOURCE, 3, offset, part))
        offset += len(part)
        messages.append(Message("rank_00004.jsonl:cd", 4, 0, b""))
    before = {SOURCE: Position(0, 3), "rank_00004.jsonl:cd": Position(0, 4, 7, 5)}
    found = Columns().convert(messages, before)
    shift_ns = head.unix_ns - head.monotonic_ns
    assert [row["t0_ns"] for row in rows(found, "steps")] == [shift_ns + 1000]
    assert found.positions[SOURCE] == Position(offset, 3, 1, shift_ns)
    assert found.positions["rank_00004.jsonl:cd"] == Position(0, 4, 7, 5)


def test_phases_that_a_rank_does_not_have_are_absent() -> None:
    columns = Columns()
    other = Sums(rank=3, step=6, sums={"back ward": {"total_ns": 4, "count": 1}})
    nothing = Sums(rank=3, step=7, sums={})
    found = rows(convert(lines(SUMS, other, nothing), columns=columns), "sums")
    assert [set(row) - {"rank", "start", "step"} for row in found] == [
        {"ns:forward", "n:forward"},
        {"ns:back ward", "n:back ward"},
        set(),
    ]
    (later,) = rows(convert(lines(other), columns=columns), "sums")
    assert later["ns:back ward"] == 4
    assert "ns:forward" not in later


GOOD_STEP = to_line(STEP).strip().encode()
TORN = "no JSON, or a torn line"


def step_with(old: bytes, new: bytes) -> bytes:
    assert old in GOOD_STEP
    return GOOD_STEP.replace(old, new)


BAD = {
    "torn": (b'{"v":1,"kind":"sum","rank":3,"st', TORN),
    "torn in sums": (b'{"v":1,"kind":"sum","rank":3,"step":5,"sums":{"a":{}', TORN),
    "not UTF-8": (step_with(b"device", b"\xffevice"), "not UTF-8"),
    "zero bytes": (GOOD_STEP + b"\0\0", TORN),
    "version": (b'{"v":2,"kind":"step"}', "schema version 2, not 1"),
    "no version": (b'{"kind":"step"}', "schema version None, not 1"),
    "kind": (b'{"v":1,"kind":"news","rank":3}', "kind 'news' is not known"),
    "odd kind": (b'{"v":1,"kind":["step"],"rank":3}', "kind \"['step']\" is not known"),
    "list": (b"[1,2]", "no JSON object"),
    "number": (b"7", "no JSON object"),
    "deep": (b"[" * 100_000, TORN),
    "missing": (b'{"v":1,"kind":"step","rank":3,"step":5}', "step without t0_ns"),
    "null": (step_with(b'"step":5', b'"step":null'), "step without step"),
    "huge": (step_with(b"1000", b"9" * 30), "t0_ns is no int64, or absurd"),
    "fraction": (step_with(b"1000", b"1.5"), "t0_ns is no int64, or absurd"),
    "absurd time": (step_with(b"1000", b"9" * 19), "t0_ns is no int64, or absurd"),
    "absurd step": (step_with(b":5,", b":9999999999999,"), "step is no int64, or absurd"),
    "minus": (step_with(b":5,", b":-5,"), "step is no int64, or absurd"),
    "text": (step_with(b"1000", b'"1000"'), "t0_ns is no int64, or absurd"),
    "truth": (step_with(b"true", b"1"), "sampled is no bool, or absurd"),
    "rank": (step_with(b'"rank":3', b'"rank":4'), "says another rank than its file"),
    "half a letter": (step_with(b"device", b"\\ud800"), "clock is no string, or absurd"),
    "sums": (
        b'{"v":1,"kind":"sum","rank":3,"step":5,"sums":{"a":7}}',
        "a phase without total_ns and count",
    ),
    "no sums": (b'{"v":1,"kind":"sum","rank":3,"step":5}', "sum without sums"),
    "float": (
        b'{"v":1,"kind":"sum","rank":3,"step":5,"sums":{"a":{"total_ns":1.5,"count":1}}}',
        "total_ns is no int64, or absurd",
    ),
    "not finite": (
        lines(PORT).strip().replace(b"2.5", b"NaN"),
        "speed_bytes_per_s is no double, or absurd",
    ),
    "header": (
        to_line(header(3)).strip().encode().replace(b"monotonic_ns", b"monotonous"),
        "monotonic_ns is no int64, or absurd",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_counted_and_its_neighbours_are_stored(name: str) -> None:
    bad, why = BAD[name]
    before, after = lines(SUMS, STEP), lines(STEP, SUMS)
    found = convert(before + bad + b"\n" + bad + b"\n\n" + after)
    assert rows(found, "unreadable") == [
        {
            "rank": 3,
            "start": 0,
            "file": "rank_00003.jsonl",
            "offset": len(before),
            "count": 2,
            "why": why,
        }
    ]
    assert [len(rows(found, table)) for table in ("steps", "sums")] == [2, 2]
    assert found.positions[SOURCE].offset == len(before) + 2 * len(bad) + 3 + len(after)


def test_a_header_behind_a_torn_line_is_not_lost() -> None:
    head = header(3)
    found = convert(b'{"v":1,"kind":"su' + lines(head, STEP))
    assert reasons(found) == {"no JSON, or a torn line": 1}
    assert rows(found, "steps")[0]["start"] == 1
    assert len(rows(found, "ranks")) == 1
    glued = convert(GOOD_STEP * 2 + b"\n")
    assert reasons(glued) == {TORN: 1}
    assert len(rows(glued, "steps")) == 1


def test_other_spelling_is_read() -> None:
    spaced = json.dumps({"kind": "step", "rank": 3, "v": 1, "new": [1], **_fields(STEP)}).encode()
    letters = json.dumps(json.loads(GOOD_STEP) | {"clock": "ger\u00e4t"}, ensure_ascii=False)
    found = convert(spaced + b"\r\n" + letters.encode() + b"\n" + lines(STEP))
    assert "unreadable" not in found.tables
    assert sorted(row["clock"] for row in rows(found, "steps")) == [
        "device",
        "device",
        "ger\u00e4t",
    ]


def test_a_line_that_was_passed_over_is_counted() -> None:
    message = Message(SOURCE, 3, 100, lines(STEP), passed_over=20_000_000)
    found = Columns().convert([message], {SOURCE: Position(100, 3, 1, 0)})
    assert reasons(found) == {"a line of 20000000 bytes": 1}
    assert found.positions[SOURCE].offset == message.end
    assert len(rows(found, "steps")) == 1


@pytest.mark.full
def test_phases_without_end_are_refused() -> None:
    columns = Columns()
    many = [
        Sums(
            rank=3, step=step, sums={f"p{step}.{i}": {"total_ns": 1, "count": 1} for i in range(8)}
        )
        for step in range(40)
    ]
    found = convert(lines(*many, SUMS), columns=columns)
    names = {name for name in found.tables["sums"].column_names if name.startswith("ns:")}
    assert 0 < len(names) <= MOST_PHASES
    stored = found.tables["sums"].num_rows
    assert stored + sum(reasons(found).values()) == 41
    again = convert(lines(*many), columns=columns)
    assert again.tables["sums"].num_rows >= stored - 1, "those that are known are stored"


def test_a_nodes_own_file_may_speak_of_any_rank() -> None:
    at = Position(0, -1, 1, SHIFT_NS)
    ports = [
        Counters(rank=rank, host="h", port="eth0", t_ns=1, sent_bytes=1, received_bytes=2)
        for rank in (-1, 3)
    ]
    found = convert(lines(*ports), at)
    assert [row["rank"] for row in rows(found, "counters")] == [-1, 3]
    assert "unreadable" not in found.tables


NUMBERS = st.integers(0, 1 << 50)
NAMES = st.text(max_size=8).map(lambda text: text.encode("utf-8", "ignore").decode())
EVENTS = st.one_of(
    st.builds(
        Step,
        rank=st.just(3),
        step=st.integers(0, 1 << 39),
        t0_ns=NUMBERS,
        dur_ns=NUMBERS,
        clock=st.just("host"),
        sampled=st.booleans(),
        launch_ns=st.none() | NUMBERS,
    ),
    st.builds(
        Sums,
        rank=st.just(3),
        step=NUMBERS.map(lambda n: n % 1000),
        sums=st.dictionaries(
            NAMES,
            st.fixed_dictionaries({"total_ns": NUMBERS, "count": st.integers(0, 1 << 30)}),
            max_size=3,
        ),
    ),
    st.builds(
        Incident,
        rank=st.just(3),
        name=NAMES,
        t_ns=NUMBERS,
        detail=st.dictionaries(NAMES, NAMES, max_size=2),
    ),
    st.just(header(3)),
)
JUNK = st.one_of(
    st.binary(max_size=60).map(lambda junk: junk.replace(b"\n", b"")),
    st.tuples(EVENTS, st.integers(0, 200)).map(lambda cut: to_line(cut[0]).encode()[:-1][: cut[1]]),
    st.just(b'{"v":1,"kind":"sum","rank":3,"step":5,"sums":'),
    st.just(b'{"v":1,"kind":"step",}'),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVENTS | JUNK, max_size=12))
def test_every_line_is_a_row_or_counted(parts: list[Event | bytes]) -> None:
    events = [part for part in parts if not isinstance(part, bytes)]
    data = b"".join(part + b"\n" if isinstance(part, bytes) else lines(part) for part in parts)
    found = convert(data)
    tables = {"step": "steps", "sum": "sums", "incident": "incidents", "header": "ranks"}
    expected = Counter(tables[event.kind] for event in events)
    junk = [part for part in parts if isinstance(part, bytes) and part.strip()]
    extra = -sum(reasons(found).values()) + len(junk)  # junk that was cut to a whole event
    for name in tables.values():
        count = len(rows(found, name))
        assert count >= expected[name], (name, parts)
        extra -= count - expected[name]
    assert extra == 0, "neither a row nor counted, or both"
    sums = [event for event in events if isinstance(event, Sums)]
    if not junk:
        assert _total_ns(rows(found, "sums")) == sum(
            times["total_ns"] for event in sums for times in event.sums.values()
        )
    assert found.positions == ({SOURCE: found.positions[SOURCE]})
    assert found.positions[SOURCE].offset == len(data)


def _total_ns(found: list[dict[str, Any]]) -> int:
    return sum(value for row in found for name, value in row.items() if name.startswith("ns:"))


def _fields(step: Step) -> dict[str, Any]:
    known = json.loads(to_line(step))
    return {name: known[name] for name in ("step", "t0_ns", "dur_ns", "clock", "sampled")}
