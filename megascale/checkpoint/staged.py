"""`Staged`: a whole state of this rank in host memory, held for whoever writes it (MegaScale 4.4).

Stage 1 makes it (`memory/slots.py`: a copy on a stream of its own), stage 2 takes it to a storage
(`behind.py`). While it is held nobody writes over it; the next states go to other slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.checkpoint.layout import Entry


@dataclass(frozen=True)
class Staged:
    """step, consumed_samples  what state it is

    path, start  its values in a file that can be mapped, from a multiple of 4,096 on
    entries      what lies where in them: what this rank writes, no copies of what others hold
    wait         blocks until the values are there (a copy may be under way)
    release      the slot may be written again; exactly once, from any thread
    """

    step: int
    consumed_samples: int
    path: Path
    start: int
    entries: tuple[Entry, ...]
    wait: Callable[[], None]
    release: Callable[[], None]

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].stop if self.entries else 0
