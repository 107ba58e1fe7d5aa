"""Carries out what was decided: commands to agents, calls to the backend.

Backends are called in threads: an eviction may take as long as a grace period, and meanwhile
another machine is asked for. What they answer comes back as events, also where they break.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megascale.cluster import messages
from megascale.cluster.actions import (
    Action,
    Alert,
    Closed,
    DumpStacks,
    EvictNode,
    FinishJob,
    Notify,
    Opened,
    Replenish,
    SelfCheck,
    StartEpoch,
    StopEpoch,
)
from megascale.cluster.backends.base import Backend, BackendError, FencedError, Machine
from megascale.cluster.driver.desk import Desk
from megascale.cluster.driver.program import Program
from megascale.cluster.job import JobState
from megascale.cluster.transitions import Allocated, HardwareSeen, NodeGone
from megascale.env import free_port

AGAIN_S = 5.0  # a backend that could not say which machines are there
_log = logging.getLogger(__name__)


class Hands:
    """`finished` is the end of the job, once it was ordered."""

    def __init__(self, desk: Desk, backend: Backend, program: Program) -> None:
        self.finished: FinishJob | None = None
        self.fenced: FencedError | None = None
        self.machines: dict[str, Machine] = {}
        self._desk, self._backend, self._program = desk, backend, program
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="backend")
        self._lock = threading.Lock()
        self._watching: Future[None] | None = None
        self._defects: set[str] = set()  # whose traceback was told
        self._owns = threading.Event()  # the backend is this driver's to call
        self._owns.set()
        self._closing = threading.Event()

    def do(self, action: Action, job: JobState) -> None:
        """In the deciding thread; never waits."""
        match action:
            case StartEpoch():
                self._start(action, job)
            case StopEpoch(nodes=nodes, save=save):
                self._tell(nodes, messages.StopRanks(save=save), job)
            case SelfCheck():
                self._self_check(action, job)
            case DumpStacks(ranks=ranks):
                for name in job.nodes_of(ranks):
                    own = job.ranks_of(job.nodes[name])
                    wanted = [rank for rank in ranks if rank in own]
                    self._desk.push(name, messages.DumpStacks(ranks=wanted), job.epoch)
            case EvictNode():
                self._call(lambda: self._evict(action))
            case Replenish():
                self._call(lambda: self._replenish(action, job))
            case FinishJob():
                self.finished = action
                self._tell(list(job.nodes), messages.Leave(), job)
            case Notify() | Alert() | Opened() | Closed():
                pass  # for people: `words.py`

    def watch(self) -> None:
        """Ask the backend what happened, unless the last question is not answered yet."""
        if self._watching is None or self._watching.done():
            self._watching = self._call(self._watch)

    def adopt(self, machines: list[Machine]) -> None:
        """After a restart. Never waits: ending what is left of others may take the backend long.
        Those that are not there any more come as events; other calls to the backend come after."""
        self.machines = {machine.name: machine for machine in machines}
        self._owns.clear()
        self._threads.submit(self._adopt, machines)

    def close(self, *, give_back: bool) -> None:
        """End the threads; with `give_back` the machines too."""
        self._closing.set()
        self._threads.shutdown(wait=give_back, cancel_futures=True)
        if give_back:
            try:
                self._backend.close()
            except BackendError as error:
                _log.error("machines may be left: %s", error)

    # ------------------------------------------------------------ inside

    def _tell(self, nodes: Sequence[str], order: messages.Order, job: JobState) -> None:
        for node in nodes:
            self._desk.push(node, order, job.epoch)

    def _start(self, action: StartEpoch, job: JobState) -> None:
        if action.back or action.newest_step is not None:
            self._program.roll_back(action.back, action.newest_step)
        for node, order in self._program.orders(action, job, free_port()):
            self._desk.push(node, order, job.epoch)

    def _self_check(self, action: SelfCheck, job: JobState) -> None:
        peers = list(action.nodes) if action.level == "full" and len(action.nodes) > 1 else []
        for node in action.nodes:
            order = messages.RunSelfCheck(
                level=action.level,
                peers=[peer for peer in peers if peer != node][:64],
                deadline_s=action.deadline_s,
            )
            self._desk.push(node, order, job.epoch)

    def _call(self, task: Callable[[], None]) -> Future[None]:
        def guarded() -> None:
            self._owns.wait()
            try:
                task()
            except FencedError as error:
                self.fenced = error
            except Exception as error:  # noqa: BLE001 - nobody reads what this future holds
                _log.error("backend: %s", self._why(error))

        return self._threads.submit(guarded)

    def _why(self, error: Exception) -> str:
        """For people; of an error that no backend should raise the traceback too, once."""
        if isinstance(error, BackendError):
            return str(error)
        text = f"{type(error).__name__}: {error}"
        if text not in self._defects:
            self._defects.add(text)
            _log.error("a defect of the backend:", exc_info=error)
        return text

    def _adopt(self, machines: list[Machine]) -> None:
        kept = None
        try:
            while kept is None and not self._closing.is_set():
                kept = self._ask_for_own(machines)
        finally:
            self._owns.set()
        if kept is None:
            return
        with self._lock:
            there = {machine.name: machine for machine in kept}
            self.machines = {name: there[name] for name in self.machines if name in there}
        for machine in machines:
            if machine.name not in there:
                self._desk.post(NodeGone(machine.name, "gone while no driver was there"))

    def _ask_for_own(self, machines: list[Machine]) -> list[Machine] | None:
        """None where the backend did not answer, some seconds later."""
        try:
            return self._backend.adopt(machines)
        except FencedError as error:
            self.fenced = error
            self._closing.set()
        except Exception as error:  # noqa: BLE001 - as that of `_call`
            why = self._why(error)
            _log.error("machines of the driver before: %s; asked again in %g s", why, AGAIN_S)
            self._closing.wait(AGAIN_S)
        return None

    def _evict(self, action: EvictNode) -> None:
        with self._lock:
            self.machines.pop(action.node, None)
        self._backend.evict(action.node, action.reason, block=action.block)

    def _replenish(self, action: Replenish, job: JobState) -> None:
        try:
            if action.first:
                found = self._backend.allocate(action.count, exclude=job.blocked)
            else:
                found = self._backend.replenish(action.count, exclude=job.blocked, near=action.near)
        except FencedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it met: an answer is waited for
            self._desk.post(Allocated(action.count, (), self._why(error)))
            return
        with self._lock:
            self.machines.update({machine.name: machine for machine in found})
        self._desk.post(Allocated(action.count, tuple(machine.name for machine in found)))

    def _watch(self) -> None:
        for event in self._backend.watch():
            if event.kind in ("gone", "preempted"):
                self._desk.post(NodeGone(event.name, f"{event.kind}: {event.reason}"))
            elif event.kind == "down":
                detail = f"the scheduler says down: {event.reason}"
                self._desk.post(HardwareSeen(event.name, "node_down", detail, certain=False))
