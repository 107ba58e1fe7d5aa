"""The page is one file that needs nobody, and its plots carry the plan's numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import ConfigError
from megascale.plan.report.page import check_report, page, write_page
from megascale.plan.report.plots import figures
from tests.plan.report.plans import PLAN, without


def test_the_page_needs_no_network() -> None:
    text = page(PLAN)
    assert "<script src" not in text
    assert "<link" not in text
    assert "Plotly.newPlot(figure.id" in text
    assert len(text) > 1_000_000, "plotly.js is within"
    assert text.count("</script>") == 3
    assert "Predicted, not measured." in text


def test_the_plots_stand_in_the_page_as_they_were_made() -> None:
    text = page(PLAN)
    found = re.search(r'<script type="application/json" id="figures">(.*)</script>', text)
    assert found is not None
    data = json.loads(found.group(1))
    assert [one["id"] for one in data] == ["parts", "memory", "sweep-tensor", "training"]
    for one in data:
        assert f'id="{one["id"]}"' in text
    assert data[0]["data"] == figures(PLAN)[0].traces


def test_bars_are_stacked_by_part_and_sum_to_the_step() -> None:
    parts = figures(PLAN)[0]
    assert [trace["name"] for trace in parts.traces] == [
        "matrix products",
        "pipeline bubble",
        "tensor-parallel communication",
    ]
    steps = [sum(values) for values in zip(*(t["x"] for t in parts.traces), strict=True)]
    assert steps == pytest.approx([4.0, 4.2, 5.0])
    assert parts.traces[0]["y"][2].startswith("17. TP 1, PP 4")


def test_memory_by_stage_under_the_limit() -> None:
    first, second, own, limit = figures(PLAN)[1].traces
    assert first["y"] == [20.0, 30.5]
    assert second["x"] == [0]
    assert own["y"] == [40.0, 30.0, 20.0, 10.0]
    assert limit["y"] == pytest.approx([130.66, 130.66])


def test_money_where_a_price_is_known_and_no_bar_without_an_end() -> None:
    trace: dict[str, Any] = figures(PLAN)[-1].traces[0]
    raw = 2.5 * 16e5 / 3600
    assert trace["y"] == pytest.approx([raw, raw / 0.9, raw / 0.8])
    assert [figure.name for figure in figures(without())] == ["parts", "memory", "sweep-tensor"]


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    check_report(None)
    with pytest.raises(ConfigError, match=r"a name that ends in \.html"):
        check_report(tmp_path / "out.pdf")
    check_report(tmp_path / "out.html")
    missing = tmp_path / "no" / "where" / "out.html"
    with pytest.raises(
        ConfigError, match=f"where does not exist; make it, or write into {tmp_path}"
    ):
        check_report(missing)
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        check_report(tmp_path)
    write_page(PLAN, tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == page(PLAN)
