"""The trace against the format's rules, against known values, and byte for byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import DataError
from megascale.events import Event, Header, Incident, Span, Step, Sums, run_header
from megascale.topology import Mesh
from megascale.trace import chrome_trace, write_trace


def header(rank: int, unix_ns: int, monotonic_ns: int) -> Header:
    base = run_header(Mesh(tensor=2), rank, host=f"node{rank}")
    return replace(base, unix_ns=unix_ns, monotonic_ns=monotonic_ns)


def span(rank: int, name: str, t0_ns: int, dur_ns: int, **more: Any) -> Span:
    return Span(rank=rank, name=name, t0_ns=t0_ns, dur_ns=dur_ns, clock="device", step=4, **more)


# Two hosts whose monotonic clocks differ: host 1 was started 1 s (of wall time) after host 0.
RANK_0: list[Event] = [
    header(0, 5_000_000_000, 3_000_000_000),
    Step(rank=0, step=4, t0_ns=3_000_001_000, dur_ns=9_000, clock="device", sampled=True),
    span(0, "forward", 3_000_001_000, 2_500, chunk=0, micro_batch=1),
    span(0, "reduce_scatter", 3_000_002_000, 3, stream="data", group="data.0", seq=2, num_bytes=8),
    Sums(rank=0, step=4, sums={"forward": {"total_ns": 2500, "count": 1}}),
]
RANK_1: list[Event] = [
    header(1, 5_000_000_000, 2_000_000_000),
    span(1, "forward", 2_000_002_000, 1_000, chunk=0, micro_batch=1),
    Incident(rank=1, name="nonfinite", t_ns=2_000_005_000, step=4, detail={"norm": float("nan")}),
    span(1, "mine", 2_000_004_000, 10, stream="alien"),
]


def rows(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_event_obeys_the_format() -> None:
    trace = json.loads(json.dumps(chrome_trace(RANK_0 + RANK_1), allow_nan=False))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    required = {
        "M": {"name", "ph", "pid", "tid", "args"},
        "X": {"name", "ph", "pid", "tid", "ts", "dur", "cat", "args"},
        "i": {"name", "ph", "pid", "tid", "ts", "s", "cat", "args"},
    }
    for event in trace["traceEvents"]:
        assert set(event) == required[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    named = {(e["pid"], e["tid"]) for e in rows(trace, "M") if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in rows(trace, "X") + rows(trace, "i")} == named
    times = [e["ts"] for e in trace["traceEvents"] if e["ph"] != "M"]
    assert times == sorted(times)


def test_values_and_the_alignment_of_two_hosts() -> None:
    trace = chrome_trace(RANK_0 + RANK_1)
    got = [(e["pid"], e["name"], e["ts"], e["dur"], e["args"]) for e in rows(trace, "X")]
    assert got == [
        (0, "step 4", 0.0, 9.0, {"step": 4}),
        (0, "forward", 0.0, 2.5, {"step": 4, "chunk": 0, "micro_batch": 1}),
        (0, "reduce_scatter", 1.0, 0.003, {"step": 4, "group": "data.0", "seq": 2, "num_bytes": 8}),
        (1, "forward", 1.0, 1.0, {"step": 4, "chunk": 0, "micro_batch": 1}),
        (1, "mine", 3.0, 0.01, {"step": 4}),
    ]
    (incident,) = rows(trace, "i")
    assert (incident["ts"], incident["args"]) == (4.0, {"norm": "nan", "step": "4"})


def test_names_of_processes_and_threads() -> None:
    meta = rows(chrome_trace(RANK_0 + RANK_1), "M")
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    assert processes == {
        0: "rank 0 (tp 0, dp 0, pp 0) on node0",
        1: "rank 1 (tp 1, dp 0, pp 0) on node1",
    }
    threads = {(e["pid"], e["args"]["name"]): e["tid"] for e in meta if e["name"] == "thread_name"}
    assert sorted(name for rank, name in threads if rank == 0) == ["compute", "data", "step"]
    assert threads[0, "compute"] == threads[1, "compute"]  # a stream has one number everywhere
    assert threads[1, "alien"] > max(threads[0, "data"], threads[1, "host"])


def test_the_same_events_give_the_same_bytes(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", RANK_0 + RANK_1)
    write_trace(tmp_path / "b.json", [*RANK_1, RANK_0[0], *reversed(RANK_0[1:])])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_an_outer_span_comes_before_the_inner_one() -> None:
    inner, outer = span(0, "inner", 10, 5), span(0, "outer", 10, 50)
    names = [e["name"] for e in rows(chrome_trace([inner, outer]), "X")]
    assert names == ["outer", "inner"]


def test_a_restarted_rank_uses_the_newer_anchor() -> None:
    events = [
        *RANK_0[:3],
        header(0, 9_000_000_000, 1_000_000_000),
        span(0, "late", 1_000_000_000, 1),
    ]
    late = rows(chrome_trace(events), "X")[-1]
    assert (late["name"], late["ts"]) == ("late", (9_000_000_000 - 5_000_001_000) / 1000)


def test_no_headers_at_all_is_one_host() -> None:
    trace = chrome_trace([span(2, "forward", 77, 1)])
    assert rows(trace, "X")[0]["ts"] == 0.0
    assert rows(trace, "M")[0]["args"] == {"name": "rank 2"}
    assert chrome_trace([]) == {"displayTimeUnit": "ms", "traceEvents": []}


def test_ranks_without_a_header_beside_ranks_with_one_are_refused() -> None:
    with pytest.raises(DataError, match=r"ranks \[1\] have no header"):
        chrome_trace(RANK_0 + RANK_1[1:])
