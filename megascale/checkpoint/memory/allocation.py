"""Making room for slots, once: what is needed is compared with what there is before any is taken.

Sizing and mapping a slot goes at about 4 GB/s (measured), and registering it with CUDA takes as
long again, so `prepare` begins behind training; the first save waits for the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory.room import Available, Need, available, describe_need, judge
from megascale.checkpoint.memory.slot import Slot
from megascale.checkpoint.memory.worker import in_thread
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)


class Allocation:
    """All methods are collective.

    needs    of each rank
    files    all slots of this rank
    folder   of their files; None where they have none
    make     makes the room of this rank; called once, in a thread
    """

    def __init__(
        self,
        ranks: Ranks,
        needs: Sequence[Need],
        files: Sequence[Slot],
        folder: Path | None,
        make: Callable[[], None],
    ) -> None:
        self._ranks, self._needs, self._files = ranks, needs, files
        self._folder, self._make = folder, make
        self._is_there: bool | None = None  # None: was not tried to the end
        self._running: Future[None] | None = None

    def prepare(self) -> None:
        """Begin; nothing where it was begun, or has failed."""
        if self._is_there is not None or self._running is not None:
            return
        try:
            why_not = judge(self._needs, self._ranks.gather(self._available))
        except CheckpointError as error:
            why_not = str(error)
        if why_not is not None:
            self._give_up(why_not)
            return
        self._say(logging.INFO, describe_need(self._needs))
        self._running = in_thread(self._make)

    def is_there(self) -> bool:
        """Wait for it. False where a rank has no room, and then on all; that is said, once."""
        if self._is_there is None:
            self.prepare()
        running, self._running = self._running, None
        if running is not None:
            try:
                self._ranks.gather(running.result)
            except CheckpointError as error:
                self._give_up(str(error))
            else:
                self._is_there = True
        return bool(self._is_there)

    def pause(self) -> None:
        """Until what was begun has ended, however."""
        if self._running is not None:
            self._running.exception()

    def _available(self) -> Available:
        return available(sum(slot.num_bytes for slot in self._files), self._folder)

    def _give_up(self, why: str) -> None:
        self._is_there = False
        for slot in self._files:
            slot.release()
        self._say(logging.WARNING, f"training goes on without memory slots: {why}")

    def _say(self, level: int, message: str) -> None:
        if self._ranks.is_writer:
            logger.log(level, message)


def make_room(
    own: Sequence[Slot],
    own_bytes: int,
    copies: Sequence[Slot],
    copy_bytes: int,
    device: torch.device,
    num_threads: int,
) -> None:
    """Size the slots and have the pages of the own ones there, for CUDA to copy to by itself."""
    on_device = device.type == "cuda"
    if device.index is not None:
        torch.cuda.set_device(device)  # a thread starts on the first
    for slots, num_bytes in ((own, own_bytes), (copies, copy_bytes)):
        for slot in slots:
            slot.allocate(num_bytes)
    for slot in own:
        slot.populate(num_threads)
        if on_device and (status := slot.register()):
            logger.warning(
                "memory slots of %s bytes cannot be registered with CUDA (error %s): the host "
                "waits for each copy; raise the limit of locked memory (ulimit -l)",
                f"{len(slot.image):,}",
                status,
            )
