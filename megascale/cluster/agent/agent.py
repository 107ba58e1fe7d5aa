"""The agent's main thread: a queue of orders, and the processes.

Starts wait for stops that are under way; a stop never waits, and takes along the starts that it
overtakes. Dumps and self-checks run beside (`errands.py`). The agent ends when it is told to leave,
by a signal, or when no driver was heard for `orphan_timeout_s`: its ranks then save first.
"""

from __future__ import annotations

import logging
import queue
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.cluster.agent.board import Board
from megascale.cluster.agent.collector import Collector
from megascale.cluster.agent.commands import Orders, Results
from megascale.cluster.agent.devices import DeviceMonitor
from megascale.cluster.agent.errands import Errands
from megascale.cluster.agent.facts import node_facts
from megascale.cluster.agent.heartbeat import Fence, Heart, Identity
from megascale.cluster.agent.ledger import Ledger
from megascale.cluster.agent.link import Link
from megascale.cluster.agent.processes import Ranks
from megascale.cluster.agent.rank_process import Deadlines, RankProcess
from megascale.cluster.agent.stream_child import StreamChild
from megascale.cluster.messages import (
    Command,
    DumpStacks,
    Joined,
    Leave,
    RunSelfCheck,
    StartRanks,
    StopRanks,
)
from megascale.errors import LaunchError

TICK_S = 0.05
DEVICES_WAIT_S = 5.0  # before the node joins without knowing them
STREAM_ENDS_S = 6.0  # what ranks wrote last is streamed and stored
GOODBYE_S = 3.0  # for the last results and the last heartbeat
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Of one agent; see `__main__.py`. The roots are elsewhere in tests."""

    driver_url: str
    token_file: Path
    node: str
    run_dir: Path
    host: str
    ip: str
    switch: str | None = None
    orphan_timeout_s: float = 600.0  # until a driver gives its own
    sys_root: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")
    fake_devices: Path | None = None
    check_margin_s: float = 10.0  # of a self-check beyond its own deadline, before it is killed


@dataclass
class _Stop:
    command: Command
    asked: list[RankProcess]


class Agent:
    """One incarnation. `run` in the main thread; the exit code of the process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._ledger = Ledger(settings.run_dir, settings.node)
        self._ranks = Ranks(self._ledger)
        self._board = Board(lambda: self._ranks.statuses)
        self._fence, self._orphan_timeout_s = Fence(), settings.orphan_timeout_s
        incarnation = uuid.uuid4().hex
        self._devices = DeviceMonitor(self._board, settings.fake_devices)
        self._devices.start()
        self._devices.has_answered.wait(DEVICES_WAIT_S)
        identity = Identity(settings.node, incarnation, node_facts(settings, self._devices.names))
        self._results = Results(self._link(), identity)
        self._heart = Heart(
            self._link(),
            identity,
            self._board,
            self._fence,
            joined=lambda joined: self._inbox.put(lambda: self._joined(joined)),
            leave=lambda why, failed: self._inbox.put(lambda: self._leave(why, failed=failed)),
            done=self._results.done,
        )
        self._orders = Orders(
            self._link(),
            identity,
            self._heart,
            self._fence,
            self._results,
            take=lambda command: self._inbox.put(lambda: self._try(command)),
        )
        self._collector = Collector(
            self._board,
            lambda: self._ranks.statuses,
            self._heart.soon,
            sys_root=settings.sys_root,
            kernel_log=settings.kernel_log,
        )
        self._errands = Errands(
            settings.run_dir, self._ranks, self._results, settings.check_margin_s
        )
        self._stream = StreamChild(settings.node)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._starts: deque[Command] = deque()
        self._stops: list[_Stop] = []
        self._leaving: str | None = None
        self._exit_code = 0

    def run(self) -> int:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        for thread in (self._collector, self._results, self._heart, self._orders, self._stream):
            thread.start()
        while self._leaving is None or not self._ranks.is_idle:
            self._take_one()
            if self._ranks.tick():
                self._collector.soon()
            self._errands.tick()
            self._advance()
            self._check_driver()
        return self._close()

    # ------------------------------------------------------------ what comes in

    def _take_one(self) -> None:
        try:
            act = self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            return
        act()

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Asked once: ranks save and end. Asked again: they end."""
        save = self._leaving is None
        name = signal.Signals(signum).name
        self._inbox.put(lambda: self._leave(f"got {name}", save=save))

    def _joined(self, joined: Joined) -> None:
        self._ranks.deadlines = Deadlines(
            grace_s=joined.grace_s,
            save_deadline_s=joined.save_deadline_s,
            kill_deadline_s=joined.kill_deadline_s,
        )
        self._orphan_timeout_s = joined.orphan_timeout_s
        if self._leaving is None:
            self._ranks.warm.want(joined.warm, joined.procs_per_node)

    def _try(self, command: Command) -> None:
        """One odd order must not end the ranks, which the end of this process would."""
        try:
            self._obey(command)
        except Exception as error:  # noqa: BLE001 - told to the driver, and in the log
            _log.exception("command %d failed", command.sequence)
            self._results.put(command, ok=False, reason=f"{type(error).__name__}: {error}")

    def _obey(self, command: Command) -> None:
        match command.order:
            case StartRanks():
                self._starts.append(command)
            case StopRanks(save=save):
                self._stop(command, save=save)
            case Leave():
                self._results.put(command, ok=True)
                self._leave("the driver says so")
            case DumpStacks() as order:
                self._errands.dump(command, order)
            case RunSelfCheck() as order:
                self._errands.self_check(command, order)

    def _stop(self, command: Command, *, save: bool) -> None:
        overtaken = [start for start in self._starts if start.epoch <= command.epoch]
        for start in overtaken:
            self._starts.remove(start)
            self._results.put(start, ok=False, reason=f"overtaken by stop {command.sequence}")
        asked = self._ranks.stop(command.epoch, save=save)
        self._stream.stopped()
        self._stops.append(_Stop(command, asked))

    def _leave(self, why: str, *, save: bool = False, failed: bool = False) -> None:
        if self._leaving is None:
            _log.info("leaving: %s", why)
        self._leaving = why
        self._exit_code = LaunchError.exit_code if failed else 0
        for start in self._starts:
            self._results.put(start, ok=False, reason=f"this agent leaves: {why}")
        self._starts.clear()
        self._ranks.warm.end()
        self._ranks.stop(self._fence.epoch, save=save)

    # ------------------------------------------------------------ what goes on

    def _advance(self) -> None:
        for stop in [s for s in self._stops if all(rank.is_settled for rank in s.asked)]:
            self._stops.remove(stop)
            stuck = [rank.status for rank in stop.asked if not rank.is_over]
            codes = {str(r.status.rank): r.status.exit_code for r in stop.asked if r.is_over}
            pids = ", ".join(f"rank {s.rank} (pid {s.pid})" for s in stuck)
            self._results.put(
                stop.command,
                ok=not stuck,
                reason=f"unkillable: {pids}; the host needs a restart" if stuck else "",
                detail={"exit_codes": codes, "unkillable": [status.pid for status in stuck]},
            )
            self._heart.soon()
        while self._starts and not self._stops and self._leaving is None:
            self._start(self._starts.popleft())

    def _start(self, command: Command) -> None:
        order = command.order
        assert isinstance(order, StartRanks), order
        try:
            failed = self._ranks.start(order, command.epoch)
        except LaunchError as error:
            self._results.put(command, ok=False, reason=str(error))
            return
        self._stream.started(Path(order.run_dir), [place.rank for place in order.ranks])
        pids = {str(s.rank): s.pid for s in self._ranks.statuses if s.epoch == command.epoch}
        reasons = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
        self._results.put(command, ok=not failed, reason=reasons, detail={"pids": pids})
        self._heart.soon()

    def _check_driver(self) -> None:
        silent_s = time.monotonic() - self._heart.last_contact_s
        if self._leaving is None and silent_s > self._orphan_timeout_s:
            self._leave(f"no driver for {silent_s:.0f} s", save=True, failed=True)

    def _close(self) -> int:
        self._collector.end(GOODBYE_S)
        self._devices.end(GOODBYE_S)
        self._errands.close()
        self._stream.end(STREAM_ENDS_S)
        self._results.end(GOODBYE_S)
        self._heart.end(GOODBYE_S)
        stuck = [s for s in self._ranks.statuses if s.state == "unkillable"]
        for status in stuck:
            _log.error("rank %d (pid %d) does not end", status.rank, status.pid)
        self._ranks.close()
        self._ledger.close()
        return LaunchError.exit_code if stuck else self._exit_code

    def _link(self) -> Link:
        return Link(self.settings.driver_url, self.settings.token_file)
