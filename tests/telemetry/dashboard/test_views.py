"""Each view in a browser, over a run with a planted fault that has to be seen on it.

Read off the page: its words, its labels for those who do not see, and the pixels of the canvas at
the guilty place. The screenshots are kept for people (`browser.SCREENS`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.telemetry.faults import Hang, LateLauncher, Restart, SlowRank
from megascale.telemetry.dashboard.server import Server
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.store.run import Run
from tests.telemetry.dashboard.browser import (
    chromium,
    count_near,
    opened_page,
    shot,
    until_true,
)
from tests.telemetry.dashboard.served import FakeDriver, dashboard, make_run, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
SLOW, LATE, SILENT = 5, 6, 9


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A slow rank, a restart, a driver with an open incident, and a rank that left an error."""
    faults = (SlowRank(SLOW, 0.25), Restart(60, 50))
    run = make_run(tmp_path_factory.mktemp("slow") / "gpt-175b", *faults, num_steps=100)
    entry = {"time_ns": 1_780_000_100 * 10**9, "message": "CUDA error: uncorrectable ECC"}
    (run / "logs" / "error-rank00011.json").write_text(json.dumps(entry | {"exit_code": 6}))
    with FakeDriver(run) as driver:
        driver.beside(run)
        with dashboard(run) as server:
            opened(server)
            yield server


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = make_run(tmp_path_factory.mktemp("hung") / "run", Hang((SILENT,), "data"), num_steps=30)
    with dashboard(run) as server:
        opened(server)
        yield server


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = make_run(tmp_path_factory.mktemp("late") / "run", LateLauncher(LATE, 0.05), num_steps=30)
    with dashboard(run) as server:
        opened(server)
        yield server


def test_the_heat_map_does_not_wait_for_the_stragglers(browser: Browser, tmp_path: Path) -> None:
    """They take seconds of 12,288 ranks on a server that has just started."""
    run = make_run(tmp_path / "run", SlowRank(SLOW, 0.25), num_steps=40)
    reader, is_drawn = READERS["stragglers"], threading.Event()

    def ask(run: Run, window: Window) -> Answer:
        assert is_drawn.wait(20.0), "the page waits"
        return reader.ask(run, window)

    with dashboard(run, readers={**READERS, "stragglers": replace(reader, ask=ask)}) as server:
        opened(server)
        with opened_page(browser, server, "#/heat") as page:
            until_true(page, "document.querySelectorAll('main canvas[data-drawn]').length === 1")
            page.locator(".outliers button").filter(has_text=f"Rank {SLOW}").wait_for()
            assert page.evaluate("globalThis.megascale.view.slow.level") == "none"
            is_drawn.set()
            until_true(page, "globalThis.megascale.view.slow.level === 'alert'")


@pytest.mark.parametrize("dark", [False, True])
def test_overview(browser: Browser, slow: Server, dark: bool) -> None:
    with opened_page(browser, slow, dark=dark) as page:
        until_true(page, "document.querySelectorAll('main canvas[data-drawn]').length === 2")
        headline = page.locator("#headline")
        headline.filter(has_text=f"ank {SLOW}").wait_for()
        assert headline.get_attribute("data-level") == "alert"
        figures = page.locator(".figures").inner_text()
        for text in ("100", "MFU", "80.0%", "on 2 hosts"):
            assert text in figures, figures
        assert "rank 9 is silent" in page.get_by_label("Incidents").inner_text()
        ledger = page.locator(".ledger").get_attribute("aria-label")
        assert ledger == "useful 80.0 %, detection 5.0 %, restart 15.0 %"
        nodes = page.get_by_label("Nodes").inner_text()
        assert "suspect" in nodes
        assert "42.0 s" in nodes
        page.wait_for_timeout(200)
        shot(page, f"overview-{'dark' if dark else 'light'}")


def test_curves_have_a_colour_a_start_and_show_what_was_done_again(
    browser: Browser, slow: Server
) -> None:
    with opened_page(browser, slow, "#/curves") as page:
        until_true(page, "document.querySelectorAll('main canvas[data-drawn]').length >= 6")
        label = page.locator('canvas[aria-label^="Loss:"]').get_attribute("aria-label") or ""
        assert label.startswith("Loss: 110 values in 3 lines"), label
        assert "start 2" in page.get_by_label("Starts of the run").inner_text()
        whole = [60.0, 0.0, 500.0, 190.0]
        assert count_near(page, whole, "accent") > 100, "the newest start has the accent"
        shot(page, "curves-light")


@pytest.mark.parametrize("dark", [False, True])
def test_heat_map_rings_lists_and_selects_the_slow_rank(
    browser: Browser, slow: Server, dark: bool
) -> None:
    with opened_page(browser, slow, "#/heat", dark=dark) as page:
        first = page.locator(".outliers button").first
        first.wait_for()
        assert f"Rank {SLOW}" in first.inner_text()
        assert "compute" in first.inner_text()
        box = page.evaluate(
            """(rank) => {
                const { view } = globalThis.megascale;
                const [x, y, side] = view.grid.box(view.cells.cellOf[view.rowOf.get(rank)]);
                return [x - 6, y - 6, side + 12, side + 12];
            }""",
            SLOW,
        )
        assert count_near(page, box, "bad") > 40, "a red ring around it"
        other = [box[0] + 3 * (box[2] - 12), box[1], box[2], box[3]]
        assert count_near(page, other, "bad") == 0, "and around nobody else"
        first.click()
        page.get_by_label("Rank 5").filter(has_text="TP 1").wait_for()
        assert "Rank 5" in page.locator("#picked").inner_text()
        assert count_near(page, box, "accent") > 40
        page.wait_for_timeout(200)
        shot(page, f"heat-{'dark' if dark else 'light'}")
        page.get_by_role("button", name="All phases").click()
        page.wait_for_timeout(200)
        shot(page, f"heat-phases-{'dark' if dark else 'light'}")


def test_timeline_shows_who_came_last(browser: Browser, late: Server) -> None:
    with opened_page(browser, late, f"#/timeline?rank={LATE}&view=data") as page:
        until_true(page, "globalThis.megascale?.view?.data?.columns.rank.length > 100")
        found: dict[str, Any] = page.evaluate(
            """(rank) => {
                const { view } = globalThis.megascale;
                const { columns, text } = view.data;
                const i = columns.rank.findIndex((one, k) => one === rank
                    && text("group", k) === "data" && text("op", k) === "reduce_scatter");
                view.choose(i);
                view.sheet.from = columns.t0_us[i] - 200000;
                view.sheet.to = columns.t0_us[i] + 300000;
                view.surface.render();
                const at = view.sheet.box(view.met.late, view.surface.width);
                return { late: columns.rank[view.met.late], members: view.met.members.length,
                    box: [at.left - 3, at.top - 3, at.wide + 6, view.sheet.lane + 6] };
            }""",
            LATE,
        )
        assert (found["late"], found["members"]) == (LATE, 4)
        assert f"rank {LATE} came last" in page.get_by_label("Timeline").first.inner_text()
        shot(page, "timeline-late")


def test_timeline_of_a_pipeline_group(browser: Browser, slow: Server) -> None:
    with opened_page(browser, slow, f"#/timeline?rank={SLOW}") as page:
        until_true(page, "globalThis.megascale?.view?.data?.columns.rank.length > 20")
        rows = page.evaluate("globalThis.megascale.view.data.rows.map((row) => row.rank)")
        assert rows == [SLOW, SLOW + 8]
        met = page.evaluate(
            """() => {
                const { view } = globalThis.megascale;
                const { columns, text } = view.data;
                const i = columns.rank.findIndex((_, k) => text("name", k) === "send");
                view.choose(i);
                view.surface.render();
                return view.met.members.map((k) => [text("name", k), columns.rank[k]]);
            }"""
        )
        assert met[0] == ["send", SLOW]
        assert met[1] == ["recv", SLOW + 8]
        page.wait_for_timeout(200)
        shot(page, "timeline-pipeline")


@pytest.mark.parametrize("dark", [False, True])
def test_the_silent_rank_of_a_hang_is_red_and_those_that_wait_are_amber(
    browser: Browser, hung: Server, dark: bool
) -> None:
    with opened_page(browser, hung, "#/space", dark=dark) as page:
        until_true(page, "globalThis.megascale?.view?.guilty?.length > 0")
        page.wait_for_timeout(200)
        at = """(rank) => {
            const { view } = globalThis.megascale;
            const mesh = view.places.meshed;
            const [x, y] = view.camera.point(mesh.at(rank, "tensor"), mesh.at(rank, "data"),
                mesh.at(rank, "pipeline"));
            return [x - 5, y - 3, 10, 8];
        }"""
        waiting = (SILENT + 2) % 16
        assert count_near(page, page.evaluate(at, SILENT), "bad", 70) > 20
        assert count_near(page, page.evaluate(at, waiting), "bad", 70) == 0
        label = page.locator("main canvas").first.get_attribute("aria-label") or ""
        assert "15 waiting, 1 silent" in label
        page.get_by_role("button", name=f"Rank {SILENT}", exact=True).click()
        facts = page.get_by_label(f"Rank {SILENT}").last.inner_text()
        assert "silent" in facts
        assert page.locator("#headline").get_attribute("data-level") == "alert"
        page.wait_for_timeout(200)
        shot(page, f"space-{'dark' if dark else 'light'}")


def test_a_rank_that_waits_says_in_what(browser: Browser, hung: Server) -> None:
    with opened_page(browser, hung, "#/space?rank=11") as page:
        facts = page.get_by_label("Rank 11").last
        facts.filter(has_text="waited").wait_for()
        assert "group data" in facts.inner_text()


def test_diagnosis_has_what_is_wrong_first(browser: Browser, slow: Server) -> None:
    with opened_page(browser, slow, "#/diagnosis") as page:
        page.get_by_text("questions asked").wait_for()
        first = page.locator(".answer").first
        assert first.get_attribute("data-level") == "alert"
        stragglers = page.locator('.answer[data-reader="stragglers"]')
        assert f"Rank {SLOW} on host" in stragglers.inner_text()
        stragglers.locator("summary").click()
        assert f'"ranks": [{SLOW}]' in stragglers.locator("pre").inner_text()
        shot(page, "diagnosis-light")


def test_logs_show_the_first_error_and_follow_a_rank(browser: Browser, slow: Server) -> None:
    with opened_page(browser, slow, "#/logs") as page:
        error = page.locator(".first-error")
        error.wait_for()
        assert "First: rank 11" in error.inner_text()
        assert "uncorrectable ECC" in error.inner_text()
        log = page.get_by_role("log")
        log.filter(has_text="step: 2  loss: 6.1").wait_for()
        with (slow.state.run_dir / "logs" / "rank00000.log").open("a") as file:
            file.write("step: 3  loss: 6.0\n")
        log.filter(has_text="step: 3").wait_for()
        shot(page, "logs-light")


def test_what_a_run_says_is_text_and_never_markup(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>", num_steps=5)
    (run / "logs" / "rank00000.log").write_text("<script>document.title='owned'</script>\n")
    with dashboard(run) as server:
        opened(server)
        with opened_page(browser, server, "#/logs") as page:
            page.get_by_role("log").filter(has_text="<script>").wait_for()
            assert "onerror" in page.locator("#name").inner_text()
            assert page.locator("img, main script").count() == 0
            assert "owned" not in page.title()
