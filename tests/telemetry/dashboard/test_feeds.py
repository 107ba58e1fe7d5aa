"""Windows from queries, logs from folders, columns from lines: without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.events import Span
from megascale.telemetry.dashboard.answers import Body, RefusedError, json_body, negotiate
from megascale.telemetry.dashboard.feeds import logs
from megascale.telemetry.dashboard.feeds.overview import metric_columns
from megascale.telemetry.dashboard.feeds.readers import ranks_of, window_of
from megascale.telemetry.dashboard.feeds.spans import columns


def test_a_window_of_a_query() -> None:
    window = window_of({"first": "3", "last": "9", "ranks": "8-10,2", "share": "0.1"})
    assert (window.first_step, window.last_step) == (3, 9)
    assert window.ranks == (2, 8, 9, 10)
    assert window.options == {"share": "0.1"}
    assert window_of({"first": ""}).first_step is None


@pytest.mark.parametrize(
    "query",
    [
        {"first": "-1"},
        {"first": "1e3"},
        {"last": "१२"},
        {"first": "9" * 20},
        {"first": "5", "last": "4"},
        {"ranks": ""},
        {"ranks": "1,,2"},
        {"ranks": "5-3"},
        {"ranks": "0-99999999"},
        {"ranks": "../../etc/passwd"},
        {f"o{number}": "1" for number in range(17)},
        {"option": "x" * 5000},
    ],
)
def test_what_is_no_window_is_refused_with_what_was_got(query: dict[str, str]) -> None:
    with pytest.raises(RefusedError) as caught:
        window_of(query)
    assert caught.value.status == 422


def test_ranks_repeat_once() -> None:
    assert ranks_of("3,1-3,2") == (1, 2, 3)
    assert ranks_of(None) is None


def _log(folder: Path, rank: int) -> Path:
    (folder / "logs").mkdir(exist_ok=True)
    return folder / "logs" / f"rank{rank:05d}.log"


def test_the_end_of_a_log_in_whole_lines_and_then_what_came(tmp_path: Path) -> None:
    path = _log(tmp_path, 3)
    path.write_text("".join(f"line {number}\n" for number in range(20_000)))
    first = logs.tail(tmp_path, 3, None)
    assert first["text"].startswith("line ")
    assert first["text"].endswith("line 19999\n")
    assert len(first["text"]) <= logs.TAIL_BYTES
    assert first["next"] == path.stat().st_size
    with path.open("a") as file:
        file.write("more\n")
    assert logs.tail(tmp_path, 3, first["next"])["text"] == "more\n"
    assert logs.tail(tmp_path, 3, first["next"] + 5)["text"] == ""


def test_a_log_that_was_replaced_begins_anew(tmp_path: Path) -> None:
    path = _log(tmp_path, 0)
    path.write_text("long ago\n" * 100)
    first = logs.tail(tmp_path, 0, None)
    path.write_text("new\n")
    again = logs.tail(tmp_path, 0, first["next"])
    assert (again["start"], again["text"]) == (0, "new\n")


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path: Path) -> None:
    _log(tmp_path, 0).write_bytes(b"ok \xff\xfe\n")
    assert logs.tail(tmp_path, 0, None)["text"] == "ok ��\n"


def test_no_log_is_said(tmp_path: Path) -> None:
    found = logs.tail(tmp_path, 7, None)
    assert (found["text"], found["next"]) == ("", 0)
    assert "rank 7 has no log" in found["why"]


def test_errors_of_ranks_in_order_of_time_and_only_whole_ones(tmp_path: Path) -> None:
    _log(tmp_path, 1).write_text("")
    for rank, time_ns in ((5, 2_000_000_000), (9, 1_000_000_000)):
        entry = {"time_ns": time_ns, "message": f"boom {rank}", "exit_code": 1}
        (tmp_path / "logs" / f"error-rank{rank:05d}.json").write_text(json.dumps(entry))
    (tmp_path / "logs" / "error-rank00002.json").write_text('{"time_ns": 1, "mess')
    (tmp_path / "logs" / "error-rank00003.json").write_text("[1]")
    (tmp_path / "logs" / "error-rankx.json").write_text("{}")
    found = logs.first_errors(tmp_path)
    assert [one["rank"] for one in found["errors"]] == [9, 5]
    assert found["ranks"] == [1]
    assert logs.first_errors(tmp_path / "nowhere") == {"errors": [], "num_errors": 0, "ranks": []}


def test_metrics_as_columns_from_a_line_on() -> None:
    lines = [
        {"step": 1, "time": 10.0, "loss": 5.123456789, "start": 0, "current": False},
        {"step": 1, "time": 20.0, "loss": 5.0, "validation_loss": 4.5, "start": 1, "current": True},
    ]
    found = metric_columns(lines, 0)
    assert found["next"] == 2
    assert found["columns"]["loss"] == [5.12346, 5.0]
    assert found["columns"]["validation_loss"] == [None, 4.5]
    assert found["columns"]["current"] == [False, True]
    assert metric_columns(lines, 1)["columns"]["step"] == [1]
    assert metric_columns(lines, 99) == {
        "next": 2,
        "columns": {"step": [], "time_s": [], "start": [], "current": []},
    }


def test_a_value_that_is_no_number_is_absent() -> None:
    found = metric_columns([{"step": 1, "loss": float("nan"), "mfu": "x"}], 0)["columns"]
    assert found["loss"] == [None]
    assert found["mfu"] == [None]


def test_spans_as_columns_with_names_as_numbers() -> None:
    spans = [
        Span(rank=1, name="forward", t0_ns=10**18 + 5_000, dur_ns=2_500, clock="host", step=4),
        Span(
            rank=2,
            name="grad_sync",
            t0_ns=10**18,
            dur_ns=1_000,
            clock="host",
            step=4,
            group="data",
            seq=7,
            issued_ns=10**18 - 2_000,
        ),
    ]
    found = columns(spans)
    assert found["base_unix_ns"] == str(10**18)
    assert found["t0_us"] == [5.0, 0.0]
    assert found["dur_us"] == [2.5, 1.0]
    assert found["issued_us"] == [None, -2.0]
    assert [found["strings"][number] for number in found["name"]] == ["forward", "grad_sync"]
    assert found["group"] == [None, found["strings"].index("data")]
    assert found["seq"] == [None, 7]


def test_an_answer_is_packed_tagged_and_not_sent_twice() -> None:
    body = json_body({"x": ["same"] * 1000})
    status, headers, content = negotiate(body, {"accept-encoding": "gzip, br"})
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert len(content) < len(body.raw) / 10
    assert negotiate(body, {})[2] == body.raw
    again = negotiate(body, {"if-none-match": headers["etag"]})
    assert (again[0], again[2]) == (304, b"")
    assert negotiate(Body(b"short"), {"accept-encoding": "gzip"})[2] == b"short"


def test_json_without_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_body({"x": float("nan")})
