"""What a rank has done, in memory that is read after it was killed, and what it is told to do."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class Field(IntEnum):
    """Steps, but `FAILED` (saves that failed). Of memory saves: the newest that is complete, as
    far as the rank knows; of checkpoints: the newest that was started, and that was committed."""

    RUN = 0
    COMPLETE = 1
    STARTED = 2
    COMMITTED = 3
    FAILED = 4


class Board:
    """Numbers of one rank, shared by a fork."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._numbers = memoryview(self._map).cast("q")

    def __getitem__(self, field: Field) -> int:
        return self._numbers[field]

    def __setitem__(self, field: Field, number: int) -> None:
        self._numbers[field] = number

    def clear(self) -> None:
        for field in Field:
            self[field] = 0


Where = Literal["memory", "disk"]


@dataclass(frozen=True)
class Orders:
    """For one life of a trainer.

    num_steps  that it runs; None: until it is killed
    where      of which save it tells that it begins, after `quiet_steps`
    point      kill yourself at this point of that save (`points.py`); None: somebody else does it
    is_behind  memory saves are completed behind training
    """

    num_steps: int | None
    where: Where
    quiet_steps: int
    point: int | None
    is_behind: bool
