"""What a GPU's allocator held when it had no more: a snapshot, written before the error is raised.

torch calls an observer inside the allocation that fails, when everything is still there; behind the
error the stack is unwound and the evidence freed. Until then it costs nothing: the allocator looks
at its list of observers only after its own retries have failed. So it is on by default
(`telemetry.memory_snapshot_on_oom`). The history of allocations with their stacks is another
matter: about 2 us for every allocation and free (torch's figure), always. So it is not switched on
here, and without it a snapshot says which blocks of which sizes and streams there are, not who made
them. For that: `megascale profile RUN --what memory` on a rank that is near its limit.

The error itself is not touched: the run ends as it would have.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from megascale.telemetry.recorder import Recorder
from megascale.telemetry.requests import profile_folder
from megascale.train.profilers import write_snapshot

logger = logging.getLogger(__name__)


def snapshot_on_oom(run_dir: Path, recorder: Recorder) -> None:
    """From now on this process's first out-of-memory error of a GPU leaves a snapshot below
    `run_dir`, where the memory profiles are too."""
    path = profile_folder(run_dir, "out-of-memory") / f"rank_{recorder.rank:05d}.pickle"
    observer = OutOfMemory(path, recorder)
    torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]


class OutOfMemory:
    """The observer. Called by the allocator, on the thread that asked."""

    def __init__(self, path: Path, recorder: Recorder) -> None:
        self._path, self._recorder = path, recorder
        self._is_done = False

    def __call__(self, device: int, asked: int, limit: int, free: int) -> None:
        """device: its index; bytes that were asked for, that there are, that are free."""
        if self._is_done:  # who catches the error and tries again has its evidence already
            return
        self._is_done = True
        try:
            write_snapshot(self._path, torch.cuda.memory._snapshot())
        except Exception as error:  # noqa: BLE001 - the allocator's C++ frame: its error goes first
            logger.warning("out of memory, and no snapshot could be written: %s", error)
            return
        self._tell(device, asked, limit, free)

    def _tell(self, device: int, asked: int, limit: int, free: int) -> None:
        logger.warning(
            "out of memory on device %d: %d bytes asked for, %d of %d free; what it holds is in "
            "%s (open it in pytorch.org/memory_viz)",
            *(device, asked, free, limit, self._path),
        )
        detail: dict[str, Any] = {"asked_bytes": asked, "free_bytes": free, "limit_bytes": limit}
        self._recorder.incident("out_of_memory", snapshot=str(self._path), **detail)
