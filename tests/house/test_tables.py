"""Which row of a case counts, how it is printed, and that rows which are none are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import tables
from tools.blocks import update

Row = dict[str, Any]


def _row(**changes: Any) -> Row:
    row = {
        "bench": "step",
        "case": {"model": "7b", "tp": 1},
        "metric": "mfu",
        "value": 0.5,
        "baselines": {"megatron_core": 0.544},
        "target": {"op": ">=", "value": 0.49},
        "met": True,
        "device": "NVIDIA H200",
        "num_devices": 2,
        "commit": "0123456789abcdef",
        "dirty": False,
        "time": "2026-01-01T00:00:00Z",
    }
    return row | changes


def test_the_newest_clean_row_of_a_case_counts() -> None:
    rows = [
        _row(value=0.51, time="2026-01-02T00:00:00Z"),
        _row(value=0.50, time="2026-01-01T00:00:00Z"),
        _row(value=0.99, time="2026-01-03T00:00:00Z", dirty=True),
        _row(value=0.40, case={"tp": 2, "model": "7b"}),
        _row(value=0.41, case={"model": "7b", "tp": 2}, time="2026-01-02T00:00:00Z"),
    ]
    assert [row["value"] for row in tables.newest_clean(rows)] == [0.51, 0.41]


def test_two_metrics_of_one_case_are_two_lines() -> None:
    rows = [_row(), _row(metric="step_s", value=2.6)]
    assert [row["metric"] for row in tables.newest_clean(rows)] == ["mfu", "step_s"]


def test_a_table_shows_what_differs_and_says_what_does_not(tmp_path: Path) -> None:
    other = _row(case={"model": "7b", "tp": 2}, baselines=None, target=None, met=None, value=0.45)
    rows = [_row(step_s=2.6451), other]
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tables.render("step show=step_s", tmp_path) == (
        "\nAll rows: model 7b, metric mfu, device 2x NVIDIA H200, commit 012345678.\n\n"
        "| tp | value | step_s | megatron_core | target | met |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| 1 | **0.5** | 2.645 | 0.544 | >= 0.49 | yes |\n"
        "| 2 | **0.45** |  |  |  |  |\n\n"
    )


def test_a_table_shows_words_and_fields_of_fields(tmp_path: Path) -> None:
    forms = {"forms": {"fused": 1.23456}, "chosen": "fused"}
    rows = [_row(**forms), _row(case={"model": "13b", "tp": 1}), _row(case={"model": "70b"})]
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tables.render("step model=7b,13b show=chosen,forms.fused,chosen.fused", tmp_path)
    assert [line.split(" | ")[:5] for line in table.splitlines()[3:7]] == [
        ["| model", "value", "chosen", "forms.fused", "chosen.fused"],
        ["| ---", "---", "---", "---", "---"],
        ["| 7b", "**0.5**", "fused", "1.235", ""],
        ["| 13b", "**0.5**", "", "", ""],
    ]


def test_a_table_is_sorted_by_keys_of_the_case(tmp_path: Path) -> None:
    rows = [_row(case={"model": m, "tp": tp}) for m, tp in (("a", 16), ("b", 2), ("a", 2))]
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = tables.render("step sort=tp,model", tmp_path).splitlines()[5:8]
    assert [line[:10] for line in lines] == ["| a | 2 | ", "| b | 2 | ", "| a | 16 |"]


def test_a_table_of_one_row_has_every_column(tmp_path: Path) -> None:
    (tmp_path / "step.jsonl").write_text(json.dumps(_row()) + "\n")
    assert tables.render("step tp=1", tmp_path) == (
        "\n| model | tp | metric | value | megatron_core | target | met | device | commit |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| 7b | 1 | mfu | **0.5** | 0.544 | >= 0.49 | yes | 2x NVIDIA H200 | 012345678 |\n\n"
    )
    assert tables.render("step tp=8", tmp_path) == "\nNo row has been measured yet.\n\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "step.jsonl:2: not a result row"),
        (json.dumps({"bench": "step"}), "are missing"),
        (json.dumps(_row(bench="flux")), "bench is 'flux' in the file of 'step'"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "step.jsonl").write_text(json.dumps(_row()) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=complaint):
        tables.read_rows("step", tmp_path)


def test_every_page_is_up_to_date() -> None:
    assert update(tables.PAGES, "table", tables.render, check=True) == 0


def test_a_key_that_older_rows_lack_has_its_column(tmp_path: Path) -> None:
    rows = [_row(), _row(case={"model": "7b", "tp": 1, "flux": "fused"})]
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "| flux | value |" in (text := tables.render("step", tmp_path))
    assert [line[:12] for line in text.splitlines() if "0.5**" in line] == [
        "|  | **0.5**",
        "| fused | **",
    ]
