"""A headless Chromium over a dashboard: what a page must not do is checked at its end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megascale.telemetry.dashboard.server import Server
from tests.telemetry.dashboard.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCREENS = Path("runs") / "dashboard-screens"  # not committed; looked at by people
WAIT_MS = 60_000  # other tests may have the cores


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser of the system; without it the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no browser at {CHROMIUM}; apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_page(
    browser: Browser,
    server: Server,
    hash_: str = "",
    *,
    dark: bool = False,
    size: tuple[int, int] = (1440, 900),
) -> Iterator[Page]:
    """The page at a view. No error in the console, no failed request, none to anywhere else."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on(
        "request", lambda one: None if one.url.startswith(server.url) else wrong.append(one.url)
    )
    try:
        page.goto(server.url + hash_)
        yield page
        assert wrong == []
    finally:
        context.close()


def shot(page: Page, name: str) -> None:
    """A screenshot for people."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENS / f"{name}.png")


def count_near(page: Page, box: list[float], colour: str, most: int = 24) -> int:
    """How many pixels of the first drawn canvas, in a box (left, top, width, height), are of a
    colour of the style sheet."""
    found: int = page.evaluate(
        """([box, name, most]) => {
            const probe = document.createElement("i");
            probe.style.color = `var(--${name})`;
            document.body.append(probe);
            const wanted = getComputedStyle(probe).color.match(/[0-9.]+/g).map(Number);
            probe.remove();
            const all = [...document.querySelectorAll("main canvas")];
            const canvas = all.find((one) => one.dataset.drawn);
            const ratio = canvas.width / canvas.clientWidth;
            const [x, y, w, h] = box.map((one) => Math.max(1, Math.round(one * ratio)));
            const { data } = canvas.getContext("2d").getImageData(x, y, w, h);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) {
                if ([0, 1, 2].every((k) => Math.abs(data[i + k] - wanted[k]) <= most)) count += 1;
            }
            return count;
        }""",
        [box, colour, most],
    )
    return found


def until_true(page: Page, expression: str, argument: Any = None) -> None:
    """Waits until a JavaScript expression is true. Playwright's own waiting needs `eval`, which the
    page's policy forbids."""
    until(lambda: page.evaluate(expression, argument), expression, WAIT_MS / 1000)
