"""The trace file: what a viewer needs, arrows that lie on their spans, paths that cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import ConfigError
from megascale.plan.simulate import Timeline, simulate
from megascale.plan.simulate.chrome import check_trace_path, write_trace
from tests.plan.simulate.prices import case_of, prices_of


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    case = case_of(6, pipeline=3, virtual=2, data=2, schedule="interleaved_1f1b")
    prices = prices_of(
        case, transfer_s=1 / 3, reduce_s=(0.1, 0.2), gather_s=(0.1, 0.2), update_s=0.7
    )
    return simulate(case, prices)


def _written(timeline: Timeline, path: Path) -> dict[str, Any]:
    write_trace(timeline, path, {"cluster": "by hand"})
    raw = path.read_bytes()
    document: dict[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return document


def test_the_trace_holds_every_span(timeline: Timeline, tmp_path: Path) -> None:
    document = _written(timeline, tmp_path / "trace.json")
    assert document["otherData"]["simulated"] is True
    assert document["otherData"]["step_s"] == timeline.step_s
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    spans = [span for stage in range(3) for span in timeline.spans(stage)]
    assert len(slices) == len(spans) + 3  # and one that is the step of each stage
    assert {event["cat"] for event in slices} == {"simulated"}
    for event, span in zip(
        [e for e in slices if e["name"] != "step"],
        spans,
        strict=True,
    ):
        assert event["name"] == span.kind
        assert event["ts"] == pytest.approx(1e6 * span.start_s, abs=2e-3)
        assert event["dur"] == pytest.approx(1e6 * span.duration_s, abs=2e-3)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {(event["pid"], event["tid"]) for event in slices} == names.keys()
    assert {names[0, event["tid"]] for event in slices if event["name"] == "forward"} == {"compute"}


def test_an_arrow_from_each_send_to_its_receive(timeline: Timeline, tmp_path: Path) -> None:
    events = _written(timeline, tmp_path / "trace.json.gz")["traceEvents"]
    at = {
        (event["pid"], event["tid"], event["ts"]): event for event in events if event["ph"] == "X"
    }
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == sum(event["ph"] in "sf" for event in events) / 2 == 2 * 6 * 5
    for number, begin in begins.items():
        end = ends[number]
        send = at[begin["pid"], begin["tid"], begin["ts"]]
        assert (send["name"], end["bp"]) == ("send", "e")
        assert begin["ts"] < end["ts"] < begin["ts"] + send["dur"]
        receive = at[end["pid"], end["tid"], begin["ts"]]
        assert receive["name"] == "recv"
        assert receive["args"]["micro_batch"] == send["args"]["micro_batch"]
        assert receive["args"]["op"] == send["args"]["op"] == begin["name"] == end["name"]


def test_rows_do_not_overlap_in_the_file(timeline: Timeline, tmp_path: Path) -> None:
    """A viewer drops what overlaps by a nanosecond."""
    events = _written(timeline, tmp_path / "trace.json")["traceEvents"]
    rows: dict[tuple[int, int], int] = {}
    for event in events:
        if event["ph"] == "X":
            row = event["pid"], event["tid"]
            start_ns = int(event["ts"] * 1000.0)
            assert start_ns >= rows.get(row, 0)
            rows[row] = start_ns + int(event["dur"] * 1000.0)


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.json"):
        check_trace_path(tmp_path / "trace.txt")
    folder = tmp_path / "folder.json"
    folder.mkdir()
    with pytest.raises(ConfigError, match="a folder; name a file in it"):
        check_trace_path(folder)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"file/below does not exist; make it, or write into"):
        check_trace_path(file / "below" / "trace.json")
    with pytest.raises(ConfigError, match=r"cannot be written to .*: Not a directory; name"):
        check_trace_path(file / "trace.json")
    with pytest.raises(ConfigError, match=r"cannot be written to /proc/trace\.json: "):
        check_trace_path(Path("/proc/trace.json"))
    with pytest.raises(ConfigError, match=r"new does not exist; make it, or write into .*"):
        check_trace_path(tmp_path / "new" / "trace.json.gz")
    check_trace_path(tmp_path / "trace.json.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.json"]


def test_a_disk_that_refuses_is_told(timeline: Timeline, tmp_path: Path) -> None:
    """What only writing finds out: a name that is too long for the file system."""
    with pytest.raises(ConfigError, match=r"cannot be written to .*: File name too long"):
        write_trace(timeline, tmp_path / ("x" * 300 + ".json"), {})
