"""Forking lives from a warm process, hearing from them, and ending them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.checkpoint.kills.board import Board, Orders
from tests.checkpoint.kills.life import Found, Took, enter

T = TypeVar("T")
_PATIENCE_S = 60.0


class Lives:
    """One life at a time, of a process a rank; as a context, it is over at the end."""

    def __init__(self, folder: Path, boards: Sequence[Board]) -> None:
        self.boards = list(boards)
        self._folder = folder
        self._num = 0
        self._pids: dict[int, int] = {}  # by rank, of those that were not waited for
        self._pipes: list[Connection] = []
        self._found: Found | None = None

    def begin(self, orders: Orders) -> Found:
        """Fork; what rank 0 finds at its start."""
        self._num += 1
        store = str(self._folder / f"store{self._num}")
        for board in self.boards:
            board.clear()
        self._pipes = []
        for rank, board in enumerate(self.boards):
            receiver, sender = mp.Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                enter(self._folder, rank, len(self.boards), board, sender, orders, store)
            sender.close()
            self._pids[rank] = pid
            self._pipes.append(receiver)
        found = [self._hear(rank, Found) for rank in range(len(self.boards))]
        assert all((f.memory, f.disk) == (found[0].memory, found[0].disk) for f in found), found
        wrong = [key for f in found for key in f.wrong]
        self._found = Found(**{**vars(found[0]), "wrong": wrong})
        return self._found

    def __enter__(self) -> Found:
        assert self._found is not None
        return self._found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for rank in list(self._pids):
            self.kill(rank)
        for pipe in self._pipes:
            pipe.close()

    def await_save(self) -> None:
        """Until the save that was ordered begins on rank 0."""
        told = self._hear(0, str)
        assert told == "now", told

    def ended(self) -> Took:
        """Of a life that ends by itself."""
        self.await_save()
        return self._hear(0, Took)

    def await_death(self) -> bool:
        """Of a life that kills itself; False where it ended before."""
        self.await_save()
        assert self._pipes[0].poll(_PATIENCE_S), "it neither dies nor ends"
        try:
            told = self._pipes[0].recv()
        except EOFError:
            return True
        assert isinstance(told, Took), told
        return False

    def kill(self, rank: int) -> None:
        pid = self._pids.pop(rank)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _hear(self, rank: int, kind: type[T]) -> T:
        pipe = self._pipes[rank]
        assert pipe.poll(_PATIENCE_S), f"rank {rank} says nothing"
        told = pipe.recv()
        assert isinstance(told, kind), told
        return told
