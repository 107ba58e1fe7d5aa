"""Which slot a save is written to, and which are held.

Invariants:
1. No slot of a save that is complete on all ranks is written before a later one is complete on all.
2. A slot that is held is never written, whatever becomes of its save. Where no other is left, the
   next save waits for a release.

So two slots keep the newest state at every moment, and a third lets a writer hold an older one as
long as it needs while every step is still saved. A ring of one slot keeps no promise of the first
kind: it is for states that nobody restores, on their way to a storage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from megascale.checkpoint.memory.slot import Slot, Stamp
from megascale.errors import CheckpointError


def writable(slots: Sequence[Slot], keep: Stamp | None, held: Collection[int] = ()) -> Slot | None:
    """The one to write: not complete, else the oldest; None where there is none.

    keep  the save whose slots are not to be written
    held  indices of slots that are not to be written either
    """
    candidates = []
    for index, slot in enumerate(slots):
        if index in held:
            continue
        header = slot.header()
        if header is None:
            return slot
        if header.stamp != keep:
            candidates.append((header.stamp, index, slot))
    return min(candidates)[2] if candidates else None


class Ring:
    """Own slots of a rank. `hold` and releases may come from any thread."""

    def __init__(self, slots: Sequence[Slot], *, timeout_s: float = 1800.0) -> None:
        self.slots = tuple(slots)
        self._timeout_s = timeout_s
        self._holds = [0] * len(self.slots)
        self._released = threading.Condition()

    def next(self, complete: Stamp | None) -> tuple[Slot, float]:
        """The slot that the next save is written to, and how long a release was waited for.

        complete  the newest save that is complete on all ranks
        """
        keep = complete if len(self.slots) > 1 else None
        since = time.monotonic()
        with self._released:
            while True:
                held = {index for index, number in enumerate(self._holds) if number}
                slot = writable(self.slots, keep, held)
                waited_s = time.monotonic() - since
                if slot is not None:
                    return slot, waited_s
                if waited_s > self._timeout_s:
                    raise CheckpointError(
                        f"a save to memory waited {waited_s:.0f} s for a slot: {len(held)} of "
                        f"{len(self.slots)} are held by checkpoints that are being written and do "
                        "not end; look at the storage that they go to"
                    )
                self._released.wait(self._timeout_s - waited_s + 0.1)

    def hold(self, slot: Slot) -> Callable[[], None]:
        """Nobody writes `slot` until the function that this gives is called, once."""
        index, released = self.slots.index(slot), False

        def release() -> None:
            nonlocal released
            with self._released:
                assert not released, "released twice"
                released = True
                self._holds[index] -= 1
                self._released.notify_all()

        with self._released:
            self._holds[index] += 1
        return release
