"""Real jobs that hang: trainers on gloo ranks, one of which has a fault at an operation of a group.

    with Hanging(folder, LAYOUT, Fault(rank=5, kind="stop", group="data")) as job:
        records = job.records()  # what the ranks recorded at their deadlines, by rank

The fault comes at the rank's next operation of the group after `step` has begun: it is left out, or
the rank is stopped, dies, or holds the interpreter's lock in front of it. One that sleeps does so
where it computes: inside of a collective's span nobody could tell it from one that waits there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from megascale.checkpoint import save
from megascale.events import Ongoing, Step, read_events
from megascale.flux import collectives
from megascale.telemetry import deadline
from megascale.telemetry.hooks import Hook
from megascale.telemetry.writer import line_file
from megascale.topology import Mesh
from megascale.train.left_out import leave_out
from megascale.train.loop import Loop
from tests.distributed import _entry, forkserver
from tests.train.harness import TINY
from tests.train.runs import Layout, _settings, _train_rank

AFTER_S = 1.0
SETTLED_S = 3 * AFTER_S  # nobody has said anything new for so long
GROUPS = ("world", "tensor", "data", "pipeline")
Kind = Literal["stop", "gil", "dead", "sleep", "skip"]
KINDS: tuple[Kind, ...] = ("stop", "gil", "dead", "sleep", "skip")

_CALLS: tuple[tuple[Any, str], ...] = (
    *((dist, name) for name in ("all_reduce", "all_to_all_single", "isend")),
    *((collectives, name) for name in ("_gather_single", "_scatter_single")),
)


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, which it has by being called with its loop."""

    rank: int
    kind: Kind
    group: str
    step: int = 4

    def __call__(self, loop: Loop) -> None:
        if loop.recorder.rank == self.rank:
            loop.recorder.hooks.append(_Planted(self, loop))


@dataclass(frozen=True)
class StuckSave:
    """A disk that hangs: one rank does not come back from writing its part of a checkpoint."""

    rank: int

    def __call__(self, loop: Loop) -> None:
        vars(deadline)["_PATIENCE_IN_SAVES"] = 1
        if loop.recorder.rank != self.rank:
            return
        marker = _marker(loop.folder.path)

        def hang(*_: object) -> None:
            marker.write_text(str(time.monotonic_ns()))
            time.sleep(3600)

        vars(save)["_write_own"] = hang


class _Planted(Hook):
    def __init__(self, fault: Fault, loop: Loop) -> None:
        self._fault, self._groups = fault, loop.assembly.groups
        self._marker = _marker(loop.folder.path)

    def on_step_start(self, step: int) -> None:
        fault = self._fault
        if step != fault.step:
            return
        which = GROUPS.index(fault.group)
        self._marker.write_text(str(time.monotonic_ns()))
        if fault.kind == "skip":
            leave_out(self._groups, which)
        elif fault.kind == "sleep":
            time.sleep(3600)
        else:
            _before_next(self._groups, which, fault.kind)


def _marker(folder: Path) -> Path:
    """The moment from which on there is the fault: on a busy machine ranks record before, too."""
    return folder / "fault"


def _before_next(groups: Any, which: int, kind: str) -> None:
    """Have the fault in front of this rank's next operation of the group."""
    wanted = (None, groups.tensor, groups.data, None)[which]

    def failing(module: Any, name: str) -> None:
        call = getattr(module, name)

        def instead(*values: Any, **named: Any) -> Any:
            if (name == "isend") == (which == 3) and (which == 3 or named.get("group") is wanted):
                _FAULTS[kind]()
            return call(*values, **named)

        setattr(module, name, instead)

    for module, name in _CALLS:
        failing(module, name)


def _hold_the_lock() -> None:
    while True:
        ctypes.PyDLL(None).sleep(3600)


_FAULTS = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": _hold_the_lock,
    "dead": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Hanging:
    """The job, until the context is left."""

    def __init__(
        self, folder: Path, layout: Layout, fault: Fault | StuckSave, *settings: str
    ) -> None:
        self.folder, self.fault = folder, fault
        self.mesh = Mesh(layout["tp"], layout["dp"], layout["pp"])
        self._settings = [
            *TINY,
            *_settings(layout),
            f"model.num_layers={2 * layout['pp']}",
            f"training.global_batch_size={4 * layout['dp']}",
            "training.steps=1000",
            "data.prefetch=0",
            "checkpoint.enable=false",
            f"telemetry.ongoing_after_s={AFTER_S}",
            f"job.run_dir={folder}",
            *settings,
        ]
        self._ranks: list[Any] = []
        self._store = tempfile.TemporaryDirectory()

    def __enter__(self) -> Hanging:
        world_size = self.mesh.world_size
        for rank in range(world_size):
            receiver, sender = forkserver.Pipe(duplex=False)
            arguments = (self._settings, False, None, self.fault)
            process = forkserver.Process(
                target=_entry,
                args=(
                    *(_train_rank, rank, world_size, f"{self._store.name}/store"),
                    *(False, arguments, sender),
                ),
            )
            process.start()
            sender.close()
            self._ranks.append((process, receiver))
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for process, receiver in self._ranks:
            process.kill()
            process.join()
            receiver.close()
        self._store.cleanup()

    def records(self, deadline_s: float = 100.0) -> dict[int, Ongoing]:
        """The newest of each rank that has not finished a step since, once all that are to say
        something have, and nobody has said anything new for a while."""
        give_up_s = time.monotonic() + deadline_s
        # Who left something out records like the others, unless gloo ends it for what then meets.
        expected = self.mesh.world_size - 1
        before: dict[int, Ongoing] | None = None
        since_s = time.monotonic()
        while True:
            records = self._since_the_fault()
            if records != before:
                before, since_s = records, time.monotonic()
            if len(records) >= expected and time.monotonic() - since_s > SETTLED_S:
                return records
            assert time.monotonic() < give_up_s, f"only ranks {sorted(records)} recorded"
            time.sleep(AFTER_S / 2)

    def _since_the_fault(self) -> dict[int, Ongoing]:
        try:
            fault_ns = int(_marker(self.folder).read_text() or 0)
        except FileNotFoundError:
            for rank, (_, receiver) in enumerate(self._ranks):
                assert not receiver.poll(), f"rank {rank} ended before: {receiver.recv()}"
            return {}
        found = {rank: self._newest(rank) for rank in range(self.mesh.world_size)}
        return {rank: one for rank, one in found.items() if one is not None and one.t_ns > fault_ns}

    def _newest(self, rank: int) -> Ongoing | None:
        file = line_file(self.folder, rank)
        newest: Ongoing | None = None
        for event in read_events(file) if file.exists() else ():
            if isinstance(event, Ongoing):
                newest = event
            elif isinstance(event, Step) and newest is not None and newest.error is None:
                newest = None if event.step >= (newest.step or 0) else newest
        return newest
