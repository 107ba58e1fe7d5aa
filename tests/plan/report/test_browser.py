"""The page in a browser: every plot is drawn, nothing is fetched, no error is in the console."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.plan.report.page import write_page
from megascale.plan.report.plots import figures
from tests.plan.report.plans import PLAN
from tests.telemetry.dashboard.browser import WAIT_MS, chromium


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_is_drawn(tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "plan.html"
    write_page(PLAN, file)
    with chromium() as browser:
        context = browser.new_context(color_scheme="dark" if scheme == "dark" else "light")
        page = context.new_page()
        problems: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        for figure in figures(PLAN):
            page.wait_for_selector(f"#{figure.name} .trace", timeout=WAIT_MS, state="attached")
        assert page.locator("#parts .point path").count() == 3 * 3, "parts of three layouts"
        assert page.inner_text("h1").startswith("16 x NVIDIA H200: TP 2, PP 2 x 2")
        assert not problems
        assert asked == [file.as_uri()]
