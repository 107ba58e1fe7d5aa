"""Looks at the driver every few seconds, in a thread of its own: it may be slow, or gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.errors import MegascaleError
from megascale.telemetry.dashboard.driver import Driver
from megascale.telemetry.dashboard.source import driver_beside

LOOK_S = 2.0


@dataclass(frozen=True)
class DriverSeen:
    """status: the newest that came, also where none comes any more; why: what stands in the way
    now, empty where nothing does."""

    status: dict[str, Any] | None = None
    why: str = "this run has no driver"


class DriverWatch:
    """`start` and `close`; in between `seen` is current.

    driver     None: look into the folder for one, also later
    on_change  told of each new `DriverSeen`
    """

    def __init__(
        self,
        run_dir: Path,
        driver: Driver | None,
        on_change: Callable[[DriverSeen], None],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self._run_dir, self.driver, self._on_change = run_dir, driver, on_change
        self._look_s = look_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="driver watch", daemon=True)
        self.seen = DriverSeen()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _work(self) -> None:
        while not self._closed.is_set():
            after = self._look()
            if after != self.seen:
                self.seen = after
                self._on_change(after)
            self._closed.wait(self._look_s)

    def _look(self) -> DriverSeen:
        """Of the driver that is known; where it does not answer, of the one that the folder names:
        perhaps the next one, at another address."""
        beside = driver_beside(self._run_dir)
        known = [] if self.driver is None else [self.driver]
        if beside is not None and beside.url not in {one.url for one in known}:
            known.append(beside)
        why = DriverSeen().why
        for driver in known:
            try:
                status = driver.status()
            except MegascaleError as error:
                why = str(error)
            else:
                self.driver = driver
                return DriverSeen(status, "")
        return DriverSeen(self.seen.status, why)
