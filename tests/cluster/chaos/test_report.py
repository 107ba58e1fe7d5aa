"""The table for people and the rows of the bench, from lines that are given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos as bench
from megascale.cluster.chaos.judge import Line
from megascale.cluster.chaos.report import JobResult, Result
from megascale.cluster.chaos.verify import Check
from tools.tables import read_rows, render


def _line(number: int, kind: str, **changes: Any) -> Line:
    line = Line(number, kind, "rank 1", 12.0, cause="signal", named="rank 1 on node0", right=True)
    for name, value in changes.items():
        setattr(line, name, value)
    return line


def _result(*lines: Line, schedule: str = "matrix", **checks: tuple[str, ...]) -> Result:
    found = [
        Check(name, checks.get(name, ()), "told")
        for name in ("loss", "samples", "orphans", "pages", "closed", "ledger")
    ]
    return Result(schedule, [JobResult("runs/job-1", list(lines), found, 0.981, 400)])


def test_the_table_says_what_is_wrong_and_what_was_left_out() -> None:
    result = _result(
        _line(1, "kill", decided_s=0.4, new_s=8.25, closing="recovered: step 9"),
        _line(2, "gil", wrong="rank 2 named, must be rank 1", right=False),
        _line(3, "partition", skipped="this machine lacks root"),
        loss=("step 7: 1.0, without faults 2.0",),
    )
    text = result.text()
    assert not result.ok
    assert "1 of 2 faults were handled as they must be" in text
    assert "2 gil rank 1: rank 2 named, must be rank 1" in text
    assert "3 partition: left out, this machine lacks root" in text
    assert "loss: WRONG, told\n    step 7: 1.0" in text
    row = next(line for line in text.splitlines() if line.startswith("1 kill"))
    assert row.split()[:6] == ["1", "kill", "rank", "1", "12.0", "0.4"]
    assert "8.2" in row
    assert row.endswith("recovered: step 9")
    assert _result(_line(1, "kill")).ok
    assert not _result(_line(1, "kill"), closed=("incident 1 was closed 0 times",)).ok
    assert json.loads(result.json_text())["faults"][1]["handled"] is False


def _rows(result: Result) -> dict[tuple[str, str], dict[str, Any]]:
    rows = list(bench.rows_of(result.to_json()))
    keys = [(row["case"]["line"], row["case"]["fault"]) for row in rows]
    assert len(keys) == len({*keys}), "a case has one row"
    return dict(zip(keys, rows, strict=True))


def test_rows_have_the_worst_value_and_its_target() -> None:
    rows = _rows(
        _result(
            _line(1, "kill", decided_s=0.4, new_s=8.0, lost_steps=1),
            _line(2, "kill", decided_s=1.9, new_s=11.0, lost_steps=0),
            _line(3, "gil", named_s=9.0, right=True),
            _line(4, "gil", named_s=14.0, right=False, wrong="no"),
        )
    )
    decision = rows["rank-killed-decision", "kill"]
    assert (decision["value"], decision["met"]) == (1.9, True)
    assert decision["target"] == {"op": "<=", "value": 2.0}
    assert (rows["rank-killed-first-new-step", "kill"]["met"]) is False
    assert rows["steps-lost", "kill"]["value"] == 1
    assert (rows["hang-right-rank", "gil"]["value"], rows["hang-named", "gil"]["value"]) == (0, 14)
    whole = rows["handled-without-a-person", "all"]
    assert (whole["value"], whole["met"], whole["num_faults"]) == (0.75, False, 4)
    assert rows["property-loss", "all"]["met"] is True
    assert ("ETTR", "all") not in rows
    assert ("fault", "gil") in rows


def test_a_kind_that_came_several_times_has_one_row_and_the_worst_of_it() -> None:
    lines = [_line(1, "kill"), _line(2, "kill", wrong="no new step")]
    assert _rows(_result(*lines))["fault", "kill"]["value"] == 0.0


def test_what_never_came_has_no_value_and_is_not_met() -> None:
    row = _rows(_result(_line(1, "kill", decided_s=None)))["rank-killed-decision", "kill"]
    assert (row["value"], row["met"]) == (None, False)


def test_ettr_is_the_standard_schedules() -> None:
    row = _rows(_result(_line(1, "kill"), schedule="standard"))["ETTR", "all"]
    assert (row["value"], row["met"]) == (0.981, True)


def test_rows_are_written_and_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _result(_line(1, "kill", decided_s=0.4, new_s=8.0, lost_steps=None))
    text = result.json_text().replace("'", "")
    program = ["import sys", f"sys.stdout.write({text!r})"]
    monkeypatch.setattr(
        subprocess,
        "run",
        _instead(subprocess.run, [sys.executable, "-c", "; ".join(program)]),
    )
    assert bench.measure(Path("chaos/matrix.toml"), Path("r.toml"), tmp_path / "chaos.jsonl") == 0
    rows = read_rows("chaos", tmp_path)
    assert {row["case"]["line"] for row in rows} >= {"rank-killed-decision", "property-loss"}
    assert all(row["value"] is not None for row in rows)
    for row in rows:
        row["dirty"] = False
    (tmp_path / "chaos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = render("chaos schedule=matrix line=fault show=cause,named_right", tmp_path)
    assert "| signal | right |" in shown


def _instead(run: Any, program: list[str]) -> Any:
    """`subprocess.run` that starts another program where megascale is meant."""

    def started(command: list[str], **options: Any) -> Any:
        return run(program if "megascale" in command else command, **options)

    return started
