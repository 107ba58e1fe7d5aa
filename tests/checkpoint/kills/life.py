"""One life of a trainer: resume from whichever tier is further, step, save, until it is killed.

It saves to memory at every step, to disk behind training at every third, and rotates. What it found
at its start, and whether that was bitwise right, it sends first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megascale.checkpoint import BackgroundSaves, Saved, apply_retention
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.load import load_newest
from megascale.checkpoint.manifest import list_checkpoints, name_order
from megascale.checkpoint.memory import MemorySlots
from megascale.storage import FileJob, FileWriter
from megascale.topology import Mesh
from tests.checkpoint.kills.board import Board, Field, Orders
from tests.checkpoint.kills.points import Points
from tests.checkpoint.kills.state import State

DISK_INTERVAL, KEEP = 3, 3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Found:
    """At the start of a life.

    memory, disk  steps of the newest states that are whole; None: none
    number        of that save to memory
    last_number   that any slot has: saves from here on are counted on from it
    committed     steps of the checkpoints, newest first
    damaged       steps of those that have a manifest and no mark
    wrong         what was loaded, and is not bitwise what those steps make
    """

    memory: int | None
    disk: int | None
    number: int
    last_number: int
    committed: list[int]
    damaged: list[int]
    wrong: list[str]

    @property
    def start(self) -> int:
        """Of this life: the further of the two."""
        return max(self.memory or 0, self.disk or 0)

    @property
    def kept(self) -> int | None:
        """What memory holds at the start: nothing, where the disk was further."""
        return self.memory if self.memory == self.start else None


class Took(NamedTuple):
    """How long a save to memory, and a checkpoint, took: medians."""

    memory_s: float
    disk_s: float


class Life:
    def __init__(self, folder: Path, rank: int, world_size: int, board: Board, tell: Any) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._board, self._tell = board, tell
        self._root = folder / "checkpoints"
        self._failures = folder / f"failed{rank}"
        self._state = State(rank, world_size)
        self._memory_s: list[float] = []
        self._disk_s: list[float] = []

    def run(self, orders: Orders, store: str) -> None:
        group, behind, saving = self._groups(store)
        mesh = Mesh(1, self._world_size, 1)
        self._slots = MemorySlots(
            str(slots_of(self._folder, self._rank)),
            self._state.counted(),
            self._state.copies(),
            mesh,
            Ranks(group),
            identity="kills",
            epoch=1,
            device=torch.device("cpu"),
            num_own=3,
            is_behind=orders.is_behind,
            group_behind=behind,
        )
        points = Points(orders.point or 0)
        points.install()
        found = self._resume(group)
        self._tell.send(found)
        with FileWriter() as writer:
            if orders.where == "disk":
                self._await(writer)
            self._saves = BackgroundSaves(self._root, Ranks(saving), writer)
            self._train(orders, found.start, points)
            self._slots.join()
            self._saves.close()
            self._note()
        self._tell.send(Took(median(self._memory_s or [0]), median(self._disk_s or [0])))

    def _await(self, writer: FileWriter) -> None:
        """Its process has started: what is killed is then in a save, not before it."""
        source = self._folder / f"source{self._rank}"
        source.write_bytes(bytes(4096))
        name = f"target{self._rank}"
        writer.write(FileJob(str(self._folder / "other"), name, b"", str(source), 0, 4096))

    def _groups(self, store: str) -> list[dist.ProcessGroup | None]:
        if self._world_size == 1:
            return [None] * 3
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, self._world_size),
            rank=self._rank,
            world_size=self._world_size,
        )
        return [dist.group.WORLD, dist.new_group(), dist.new_group()]

    def _resume(self, group: dist.ProcessGroup | None) -> Found:
        state, number = self._state, self._slots._number
        disk = load_newest(self._root, state.loaded(), group=group)
        wrong = state.wrong_after(disk.step, with_copy=False) if disk else []
        stamp = self._slots.restore(None)
        if stamp is not None:
            wrong += state.wrong_after(stamp.step, with_copy=True)
        if disk is not None and (stamp is None or stamp.step < disk.step):
            load_newest(self._root, state.loaded(), group=group)
            state.set_copy()
            self._slots.forget()
        listing = list_checkpoints(self._root)
        return Found(
            memory=stamp.step if stamp else None,
            disk=disk.step if disk else None,
            number=stamp.number if stamp else 0,
            last_number=number,
            committed=[name_order(path)[0] for path in listing.committed],
            damaged=[name_order(path)[0] for path in listing.damaged],
            wrong=wrong,
        )

    def _train(self, orders: Orders, start: int, points: Points) -> None:
        board, slots, step = self._board, self._slots, start
        while orders.num_steps is None or step < start + orders.num_steps:
            slots.before_update()
            self._state.step()
            step += 1
            board[Field.RUN] = step
            is_due = step % DISK_INTERVAL == 0
            is_target = orders.where == "memory" or is_due
            if is_target and step > start + orders.quiet_steps:
                self._arm(points)
                orders = replace(orders, quiet_steps=1 << 40)
            since_s = time.monotonic()
            slots.begin(step, 8 * step)
            board[Field.COMPLETE] = step - 1
            staged = slots.hold() if is_due else None
            slots.settled()
            if not orders.is_behind:
                board[Field.COMPLETE] = step
                self._memory_s.append(time.monotonic() - since_s)
            if is_due:
                assert staged is not None
                self._saves.join()  # as one that is due waits
                self._note()
                board[Field.STARTED] = step
                self._saves.start(staged, {"consumed_samples": 8 * step})
            self._note()
        slots.join()
        board[Field.COMPLETE] = step

    def _arm(self, points: Points) -> None:
        points.arm()
        self._tell.send("now")

    def _note(self) -> None:
        """Of checkpoints that have ended: counted, and the old ones rotated out."""
        for ended in self._saves.finished():
            if not isinstance(ended, Saved):
                self._board[Field.FAILED] += 1
                self._failures.write_text(f"{ended}\n")
                continue
            self._board[Field.COMMITTED] = ended.step
            self._disk_s.append(ended.seconds)
            if self._rank == 0:
                apply_retention(self._root, KEEP, known_good=ended.path)


def slots_of(folder: Path, rank: int) -> Path:
    """Each rank's memory in a folder of its own, as if it were on a node of its own."""
    place = folder / f"node{rank}"
    place.mkdir(parents=True, exist_ok=True)
    return place / "slot"


def enter(
    folder: Path,
    rank: int,
    world_size: int,
    board: Board,
    tell: Any,
    orders: Orders,
    store: str,
) -> None:
    """In a process of its own, which does not return, and does not outlive its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        Life(folder, rank, world_size, board, tell).run(orders, store)
    except BaseException as error:  # noqa: BLE001 - the edge of a process: told, for a message
        tell.send(f"{type(error).__name__}: {error}")
    os._exit(0)
