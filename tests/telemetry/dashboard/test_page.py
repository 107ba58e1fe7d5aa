"""The page as a whole: live, by keyboard, for those who do not see, and with the token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.telemetry.faults import SlowRank
from megascale.telemetry.dashboard.server import Server
from tests.telemetry.dashboard.browser import chromium, opened_page, shot, until_true
from tests.telemetry.dashboard.served import TOKEN, FakeDriver, dashboard, make_run, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
VIEWS = ("overview", "curves", "heat", "timeline", "space", "diagnosis", "logs")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = make_run(tmp_path_factory.mktemp("page") / "run", SlowRank(5, 0.25), num_steps=60)
    with dashboard(run) as serving:
        opened(serving)
        yield serving


def test_a_run_that_grows_is_seen_to_grow(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with dashboard(folder) as server, opened_page(browser, server) as page:
        page.locator("#headline").filter(has_text="There is no folder").wait_for()
        shot(page, "waiting")
        make_run(folder, num_steps=20)
        page.locator("#live").filter(has_text="step 20").wait_for()
        page.locator(".figures").filter(has_text="20").wait_for()
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**last, "step": 21, "loss": 1.2345}) + "\n")
        page.locator(".figures").filter(has_text="1.234").wait_for()
        until_true(
            page,
            "document.querySelector('canvas[aria-label^=\"Loss: 21 values\"]') !== null",
        )


def test_a_dashboard_that_ends_is_said_to_have_ended(browser: Browser, tmp_path: Path) -> None:
    with dashboard(make_run(tmp_path / "run", num_steps=5)) as server:
        opened(server)
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        page.locator("#live.on").wait_for()
    page.locator("#live.lost").wait_for()
    context.close()


def test_every_view_by_keyboard_alone(browser: Browser, server: Server) -> None:
    with opened_page(browser, server) as page:
        page.locator("main .figures").wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        seen = []
        for _ in range(12):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.textContent"))
        assert [one for one in seen if one in ("Overview", "Heat map", "3D", "Logs")] == [
            "Overview",
            "Heat map",
            "3D",
            "Logs",
        ]
        page.keyboard.press("Escape")  # out of a field, where a digit is a digit
        for number, name in enumerate(VIEWS, 1):
            page.keyboard.press(str(number))
            until_true(page, "(name) => globalThis.megascale.shown === name", name)


def test_walking_the_heat_map_with_arrow_keys(browser: Browser, server: Server) -> None:
    with opened_page(browser, server, "#/heat") as page:
        page.locator(".outliers button").first.wait_for()
        page.locator("main canvas[role=application]").focus()
        for key in ("ArrowRight", "ArrowLeft", "ArrowLeft"):
            page.keyboard.press(key)
        said = page.get_by_label("Heat map").first.inner_text()
        walked = re.search(r"rank (\d+) on (node-\d+), TP", said)
        assert walked, said
        page.keyboard.press("Enter")
        assert f"Rank {walked[1]}" in page.locator("#picked").inner_text()
        page.keyboard.press("+")
        assert page.evaluate("globalThis.megascale.view.grid.zoom") > 1
        page.keyboard.press("0")
        assert page.evaluate("globalThis.megascale.view.grid.zoom") == 1
        page.keyboard.press("Escape")
        assert page.locator("#picked").inner_text() == ""


def test_timeline_and_topology_move_by_keys(browser: Browser, server: Server) -> None:
    with opened_page(browser, server, "#/timeline?rank=5") as page:
        until_true(page, "globalThis.megascale?.view?.data?.columns.rank.length > 20")
        page.locator("main canvas").focus()
        whole = page.evaluate("globalThis.megascale.view.sheet.to")
        page.keyboard.press("+")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("globalThis.megascale.view.sheet.from") > 0
        page.keyboard.press("0")
        assert page.evaluate("globalThis.megascale.view.sheet.to") == whole
        page.keyboard.press("5")
        until_true(
            page, "globalThis.megascale.shown === 'space' && globalThis.megascale.view.scene"
        )
        page.locator("main canvas").focus()
        before = page.evaluate("globalThis.megascale.view.camera.yaw")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("globalThis.megascale.view.camera.yaw") < before


@pytest.mark.parametrize("view", VIEWS)
def test_every_control_has_a_name_and_every_view_fits(
    browser: Browser, server: Server, view: str
) -> None:
    with opened_page(browser, server, f"#/{view}") as page:
        until_true(page, "(name) => globalThis.megascale?.shown === name", view)
        page.wait_for_timeout(300)
        nameless = page.evaluate(
            """() => {
                const kinds = "button, a, select, input, canvas, dialog, nav, [role]";
                const said = (one, name) => one.getAttribute(name);
                return [...document.querySelectorAll(kinds)]
                    .filter((one) => one.offsetParent && said(one, "aria-hidden") !== "true")
                    .filter((one) => !["status", "log"].includes(said(one, "role")))
                    .filter((one) => !(said(one, "aria-label") || said(one, "aria-labelledby")
                        || one.textContent.trim() || one.labels?.length))
                    .map((one) => one.outerHTML.slice(0, 120));
            }"""
        )
        assert nameless == []
        assert page.evaluate("document.documentElement.lang") == "en"
        assert page.evaluate("document.querySelectorAll('main, h1').length") == 2
        assert page.evaluate("document.querySelectorAll('[aria-current=page]').length") == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no sideways"
        assert page.evaluate("document.querySelectorAll('*').length") < 1500
        page.set_viewport_size({"width": 420, "height": 800})
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nor narrow"


def test_light_dark_and_what_the_system_says(browser: Browser, server: Server) -> None:
    with opened_page(browser, server, dark=True) as page:
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == "dark"
        button = page.locator("#theme")
        button.click()
        assert page.evaluate(theme) == "light"
        assert button.get_attribute("aria-label") == "Colours: light"
        page.reload()
        page.locator("main .figures").wait_for()
        assert page.evaluate(theme) == "light", "it is remembered"
        button.click()
        assert page.evaluate(theme) == "dark"


def test_with_the_token_a_person_acts_and_without_nothing_is_offered(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    with opened_page(browser, server) as page:
        page.locator("main .figures").wait_for()
        assert not page.locator("#act").is_visible()
    run = make_run(tmp_path / "run", num_steps=12)
    with FakeDriver(run) as driver:
        driver.beside(run)
        with dashboard(run, token=TOKEN) as serving:
            opened(serving)
            context = browser.new_context()
            page = context.new_page()
            page.goto(serving.url)
            page.locator("#act").click()
            page.get_by_label("Token").fill("wrong")
            page.get_by_role("button", name="Unlock").click()
            page.get_by_text("needs the header").wait_for()
            page.get_by_label("Token").fill(TOKEN)
            page.get_by_role("button", name="Unlock").click()
            page.get_by_role("spinbutton", name="Steps").fill("2")
            page.get_by_role("button", name="Ask", exact=True).click()
            page.get_by_text("16 ranks asked for spans of steps").wait_for()
            page.get_by_role("textbox", name="Node").fill("n1")
            page.get_by_role("textbox", name="Why").fill("slow")
            shot(page, "act")
            page.get_by_role("button", name="Evict").click()
            page.get_by_text("The driver has it").wait_for()
            context.close()
    assert driver.evicted == [{"node": "n1", "reason": "slow", "block": True}]
    requests = list((run / "telemetry" / "requests").glob("*.json"))
    assert len(requests) == 1
    assert json.loads(requests[0].read_text())["what"] == "spans"
