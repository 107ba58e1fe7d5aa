"""A file of a remote file system, written from its start to its end through fsspec's own file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from megascale.storage.gathered import Gathered
from megascale.storage.interface import BLOCK_BYTES
from megascale.storage.waiting import answer, move_all


class StreamedFile:
    """Memory: a block that is gathered here, and the library's own buffer of a block."""

    def __init__(
        self, system: Any, path: str, *, doing: str, stall_s: float, moved: Callable[[int], None]
    ) -> None:
        self._system, self._path = system, path
        self._doing, self._stall_s, self._moved = doing, stall_s, moved
        self._file: Any = None
        self._gathered = Gathered(BLOCK_BYTES, BLOCK_BYTES, self._write)

    def append(self, part: memoryview) -> None:
        self._gathered.append(part)

    def finish(self) -> None:
        self._write(self._gathered.rest())
        self._ask(self._file.close)

    def abort(self) -> None:
        """What is half there has no name that anybody trusts; still it takes room."""
        with contextlib.suppress(Exception):  # what failed before is what is told
            if self._file is not None:
                self._ask(self._file.close)
        with contextlib.suppress(Exception):
            self._ask(lambda: self._system.rm(self._path))

    def _write(self, run: memoryview) -> None:
        if self._file is None:
            self._file = self._ask(
                lambda: self._system.open(self._path, "wb", block_size=BLOCK_BYTES)
            )

        def write(start: int) -> int:
            return int(self._file.write(run[start : start + BLOCK_BYTES]))

        starts = range(0, run.nbytes, BLOCK_BYTES)
        move_all(starts, write, doing=self._doing, stall_s=self._stall_s, moved=self._moved)

    def _ask(self, call: Callable[[], Any]) -> Any:
        return answer(call, doing=self._doing, stall_s=self._stall_s)
