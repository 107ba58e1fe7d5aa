"""What is known of the node, between the threads that find it out and the one that tells it.

Nothing here waits for a file, a device or a process. What is to be told once (steps, incidents,
log lines, Xids) is kept, bounded, until a heartbeat that carried it was heard: the driver may see
it twice after a lost answer, never not at all unless the bound was passed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megascale.cluster.agent.failures import first_failed
from megascale.cluster.agent.proc import read_stat
from megascale.cluster.agent.progress import Pages
from megascale.cluster.agent.rank_process import RankStatus
from megascale.cluster.messages import (
    DeviceReport,
    Failure,
    LogMatch,
    NicReport,
    Noticed,
    RankReport,
    StepSums,
)

FAILURE_WAIT_S = 1.0  # an exit is told with its cause, or without it after this
SETTINGS_S = 60.0
MOST_STEPS, MOST_NOTICED, MOST_LOG, MOST_XIDS = 64, 16, 64, 64
_Item = TypeVar("_Item")
Key = tuple[int, int]  # epoch, rank


class Unsent(Generic[_Item]):
    """Items until they were heard, the newest `most`."""

    def __init__(self, most: int) -> None:
        self._items: deque[tuple[int, _Item]] = deque(maxlen=most)
        self._count = 0
        self._lock = threading.Lock()

    def add(self, item: _Item) -> None:
        with self._lock:
            self._count += 1
            self._items.append((self._count, item))

    def items(self) -> tuple[list[_Item], int]:
        """All, and what to hand to `heard` afterwards."""
        with self._lock:
            return [item for _, item in self._items], self._count

    def heard(self, upto: int) -> None:
        with self._lock:
            while self._items and self._items[0][0] <= upto:
                self._items.popleft()


@dataclass
class Known:
    """What the collector found out about one rank of one epoch."""

    steps: Unsent[StepSums] = field(default_factory=lambda: Unsent(MOST_STEPS))
    noticed: Unsent[Noticed] = field(default_factory=lambda: Unsent(MOST_NOTICED))
    failure: Failure | None = None
    is_explained: bool = False  # it has ended, and whether there is a failure has been looked into


@dataclass(frozen=True)
class Report:
    """One heartbeat's contents; call `heard` when the driver has it."""

    ranks: list[RankReport]
    first_failed: int | None
    devices: list[DeviceReport]
    nics: list[NicReport]
    log: list[LogMatch]
    heard: Callable[[], None]


class Board:
    """Shared by all threads of the agent. `report` is the heartbeat's."""

    def __init__(self, statuses: Callable[[], tuple[RankStatus, ...]]) -> None:
        self._statuses, self._pages = statuses, Pages()
        self._known: dict[Key, Known] = {}
        self._lock = threading.Lock()
        self._matches: dict[tuple[int | None, str], LogMatch] = {}
        self._xids: dict[int, Unsent[int]] = {}
        self._devices: list[DeviceReport] = []
        self._nics: list[NicReport] = []
        self._settings: dict[str, dict[str, str]] = {}  # as they were last told
        self._settings_s = 0.0

    # ------------------------------------------------------------ found out

    def of(self, status: RankStatus) -> Known:
        with self._lock:
            return self._known.setdefault((status.epoch, status.rank), Known())

    def matched(self, match: LogMatch) -> None:
        """Equal rules of one rank are counted; the first line stays. A new one beyond is dropped,
        its rank's failure has it all the same."""
        key = (match.rank, match.rule)
        with self._lock:
            before = self._matches.get(key)
            if before is not None:
                match = before.model_copy(update={"count": before.count + match.count})
            elif len(self._matches) >= MOST_LOG:
                return
            self._matches[key] = match

    def see_devices(self, devices: list[DeviceReport]) -> None:
        """Replace the devices' reports; their Xids are kept until told."""
        with self._lock:
            for device in devices:
                unsent = self._xids.setdefault(device.index, Unsent(MOST_XIDS))
                for xid in device.xid:
                    unsent.add(xid)
            self._devices = devices

    def see_nics(self, nics: list[NicReport]) -> None:
        """Replace the reports. Settings are told when they changed and every `SETTINGS_S`."""
        self._nics = nics

    # ------------------------------------------------------------ told

    def report(self) -> Report:
        statuses = self._statuses()
        self._pages.keep(statuses)
        with self._lock:
            wanted = {(status.epoch, status.rank) for status in statuses}
            self._known = {key: self._known[key] for key in self._known.keys() & wanted}
            matches, devices = dict(self._matches), list(self._devices)
        hear: list[Callable[[], None]] = [lambda: self._heard_matches(matches)]
        ranks = [self._rank(status, hear) for status in statuses]
        return Report(
            ranks=ranks,
            first_failed=first_failed({r.rank: r.failure for r in ranks if r.failure}),
            devices=[self._device(device, hear) for device in devices],
            nics=self._interfaces(hear),
            log=list(matches.values()),
            heard=lambda: _call_all(hear),
        )

    def _rank(self, status: RankStatus, hear: list[Callable[[], None]]) -> RankReport:
        known, now_s = self.of(status), time.monotonic()
        steps, steps_mark = known.steps.items()
        noticed, noticed_mark = known.noticed.items()
        hear.append(lambda: known.steps.heard(steps_mark))
        hear.append(lambda: known.noticed.heard(noticed_mark))
        stat = read_stat(status.pid) if status.state != "exited" else None
        if stat is not None and stat.start_ticks != status.start_ticks:
            stat = None
        progress = self._pages.read(status)
        state = status.state
        failure_is_due = status.ended_s is not None and now_s - status.ended_s < FAILURE_WAIT_S
        if state == "exited" and not known.is_explained and failure_is_due and not status.asked:
            state = "running"  # a moment longer, until its cause is known
        until_s = now_s if status.ended_s is None else status.ended_s
        return RankReport(
            rank=status.rank,
            local_rank=status.local_rank,
            pid=status.pid,
            epoch=status.epoch,
            state="starting" if state == "running" and progress is None else state,
            os_state=stat.state if stat else None,
            uptime_s=until_s - status.started_s,
            exit_code=None if state in ("running", "starting") else status.exit_code,
            rss_bytes=stat.rss_bytes if stat else None,
            progress=progress,
            failure=known.failure,
            steps=steps,
            noticed=noticed,
        )

    def _interfaces(self, hear: list[Callable[[], None]]) -> list[NicReport]:
        nics, settings = self._nics, {nic.name: nic.settings for nic in self._nics}
        now_s = time.monotonic()
        if settings == self._settings and now_s - self._settings_s < SETTINGS_S:
            return [nic.model_copy(update={"settings": {}}) for nic in nics]

        def heard() -> None:
            self._settings, self._settings_s = settings, now_s

        hear.append(heard)
        return nics

    def _device(self, device: DeviceReport, hear: list[Callable[[], None]]) -> DeviceReport:
        unsent = self._xids[device.index]
        xids, mark = unsent.items()
        hear.append(lambda: unsent.heard(mark))
        return device.model_copy(update={"xid": xids})

    def _heard_matches(self, told: dict[tuple[int | None, str], LogMatch]) -> None:
        with self._lock:
            for key, match in told.items():
                now = self._matches.pop(key, None)
                if now is not None and now.count > match.count:
                    left = now.count - match.count
                    self._matches[key] = now.model_copy(update={"count": left})


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
