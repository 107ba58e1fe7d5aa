"""All that the routes look at: the run, the driver, and who is told of what changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from megascale.errors import LaunchError
from megascale.telemetry.dashboard.answers import Body
from megascale.telemetry.dashboard.driver import Driver
from megascale.telemetry.dashboard.events import Hub
from megascale.telemetry.dashboard.feeds.overview import Summary, summarise
from megascale.telemetry.dashboard.feeds.readers import key_of, read
from megascale.telemetry.dashboard.live import REFRESH_S, LiveRun, Seen
from megascale.telemetry.dashboard.source import Source
from megascale.telemetry.dashboard.watch import LOOK_S, DriverSeen, DriverWatch
from megascale.telemetry.readers.answer import Reader, Window
from megascale.telemetry.store.run import Run

MOST_TOLD = 20  # new incidents of one event
FIRST = ("hang", "summary")  # readers that every page asks, in this order
LONG = frozenset({"summary", "late"})  # readers that take seconds of a large run


class State:
    """Between `start` and `close` it is current.

    open_run, readers  `telemetry.store.run.open_run` and `telemetry.readers.READERS`
    may_write          a token was given
    """

    def __init__(
        self,
        source: Source,
        open_run: Callable[[Path], Run],
        readers: Mapping[str, Reader],
        *,
        may_write: bool = False,
        refresh_s: float = REFRESH_S,
        look_s: float = LOOK_S,
    ) -> None:
        self.run_dir, self.readers, self.hub = source.run_dir, readers, Hub()
        self._may_write = may_write
        self.live = LiveRun(
            lambda: open_run(source.run_dir), summarise, self._on_run, refresh_s=refresh_s
        )
        self._watch = DriverWatch(source.run_dir, source.driver, self._on_driver, look_s=look_s)

    def start(self) -> None:
        self.live.start()
        self._watch.start()

    def close(self) -> None:
        self.hub.close()
        self.live.close()
        self._watch.close()

    def ask_reader(self, reader: Reader, window: Window, query: Mapping[str, str]) -> Future[Body]:
        """What it answers, to be had once by all who ask the same; errors as of `LiveRun.ask`."""
        answer = partial(read, reader=reader, window=window)
        return self.live.ask(key_of(reader.name, query), answer, is_long=reader.name in LONG)

    def overview(self) -> dict[str, Any]:
        """`revision` 0 while there is no run; then `why` says what is missing."""
        seen = self.live.seen
        known = dict(seen.summary.overview) if seen.summary is not None else {}
        return {
            "run_dir": str(self.run_dir.absolute()),
            "revision": seen.revision,
            "why": seen.why,
            "may_write": self._may_write,
            **known,
            "driver": self.driver(),
        }

    def metrics(self) -> tuple[Sequence[Mapping[str, Any]], int]:
        """The lines of metrics.jsonl, and the number of starts: where that grows, lines that were
        newest are so no more, and all have to be read again."""
        summary = self.live.seen.summary
        return ((), 0) if summary is None else (summary.metrics, len(summary.overview["starts"]))

    def driver(self) -> dict[str, Any]:
        seen = self._watch.seen
        return {"status": seen.status, "why": seen.why}

    def driver_client(self) -> Driver:
        """LaunchError where there is none."""
        if self._watch.driver is None:
            raise LaunchError("this run has no driver: nothing can be evicted from it")
        return self._watch.driver

    def _on_run(self, before: Seen, after: Seen) -> None:
        new: Summary | None = after.summary
        old: Summary | None = before.summary
        step = None if new is None else new.newest_step
        self.hub.publish("state", {"revision": after.revision, "step": step, "why": after.why})
        if new is not None and old is None:
            self._warm()
        if new is None or old is None:
            return
        known = {_key(one) for one in old.overview["incidents"]}
        heard = [one for one in new.overview["incidents"] if _key(one) not in known][-MOST_TOLD:]
        if heard:
            names = ("unix_s", "rank", "name", "step")
            told = [{name: one[name] for name in names} for one in heard]
            self.hub.publish("incident", {"incidents": told})

    def _warm(self) -> None:
        """Ask what every page asks first, while the person still opens it."""
        for reader in (self.readers[name] for name in FIRST if name in self.readers):
            self.ask_reader(reader, Window(), {})

    def _on_driver(self, seen: DriverSeen) -> None:
        status = seen.status or {}
        self.hub.publish(
            "driver",
            {
                "phase": status.get("phase"),
                "why": seen.why,
                "ettr": status.get("ettr"),
                "incidents": len(status.get("incidents", ())),
            },
        )


def _key(incident: Mapping[str, Any]) -> tuple[float, int, str]:
    return incident["unix_s"], incident["rank"], incident["name"]
