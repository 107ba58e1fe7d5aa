"""Storages that write down what is asked of them, are slow, or go away while they are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megascale.errors import StorageError
from megascale.storage import LocalFolder


class Recording(LocalFolder):
    """`written`: the names of all that was written, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []

    def write(
        self, name: str, parts: Iterable[memoryview], moved: Callable[[int], None] = lambda _: None
    ) -> None:
        super().write(name, parts, moved)
        self.written.append(name)

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        self.written.append(name)


class Vanishing(LocalFolder):
    """Gone in the middle of the next file that is written, until `is_back`."""

    is_back = False

    def write(
        self, name: str, parts: Iterable[memoryview], moved: Callable[[int], None] = lambda _: None
    ) -> None:
        if self.is_back:
            super().write(name, parts, moved)
            return
        for part in parts:
            moved(part.nbytes)
        raise StorageError(f"writing {name} to {self.url}: the folder is not there; mount it")

    def remove(self, name: str) -> None:
        if not self.is_back:
            raise StorageError(f"removing {name} from {self.url}: the folder is not there")
        super().remove(name)


class Slow(LocalFolder):
    """Each block takes `block_s`."""

    def __init__(self, root: Path, block_s: float, stall_s: float) -> None:
        super().__init__(root, stall_s=stall_s)
        self._block_s = block_s

    def write(
        self, name: str, parts: Iterable[memoryview], moved: Callable[[int], None] = lambda _: None
    ) -> None:
        def slowly() -> Iterable[memoryview]:
            for part in parts:
                time.sleep(self._block_s)
                yield part

        super().write(name, slowly(), moved)
