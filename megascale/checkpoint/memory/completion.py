"""What makes a save count: its slot is marked, its copy is with the keeper, all ranks have met.

Hashing goes on beside sending: the first page, which tells the hash, is sent last. A keeper that
goes meanwhile costs the copy; the own slot is marked all the same, for a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.checkpoint.memory.arrangement import Arrangement
from megascale.checkpoint.memory.body import Body
from megascale.checkpoint.memory.hashing import Arrival, Hasher
from megascale.checkpoint.memory.pacing import Pacer
from megascale.checkpoint.memory.ring import writable
from megascale.checkpoint.memory.slot import Header, Slot, Stamp
from megascale.checkpoint.memory.transfer import transfer
from megascale.checkpoint.memory.worker import in_thread
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)


class Completion:
    """complete  the newest save that is complete on all ranks
    doing        what goes on, for whoever waits
    """

    def __init__(
        self,
        body: Body,
        copies: Sequence[Slot],
        rank: int,
        arrangement: Arrangement,
        group: dist.ProcessGroup | None,
        pacer: Pacer,
        *,
        identity: str,
        layout: str,
    ) -> None:
        self._body, self._copies, self._rank = body, copies, rank
        self._all, self._group, self._pacer = arrangement, group, pacer
        self._identity, self._layout = identity, layout
        self.hasher = Hasher(arrangement.num_threads)
        self.complete: Stamp | None = None
        self.doing = ""

    def hash_of(self, image: Tensor, arrivals: Sequence[Arrival] = ()) -> str:
        """Of the values in a slot's image, hashed as they arrive."""
        return self.hasher.hash_of(image[self._body.start :], arrivals)

    def run(self, slot: Slot, stamp: Stamp, hashed: Future[str] | None = None) -> None:
        """The values are in `slot`. Collective over the group.

        hashed  where somebody hashes them already
        """
        slot.write_table(self._body.table)
        if self._group is None:
            self._mark(slot, stamp, hashed)
        else:
            marked = in_thread(lambda: self._mark(slot, stamp, hashed))
            try:
                self._exchange(slot, marked, self._group)
            except CheckpointError as error:
                marked.result()
                logger.error("%s; the own slot of this save counts for a restart", error)
                raise
            self.doing = "all ranks meet"
            dist.all_reduce(torch.zeros(1), group=self._group)
        self.complete = stamp

    def why_late(self, waited_s: float) -> str:
        return (
            f"a save to memory has not ended in {waited_s:.0f} s ({self.doing}): rank "
            f"{self._all.keeper}, which keeps its copy, or another is gone or stuck"
        )

    def copies_to_size(self) -> list[Slot]:
        """A copy of the newest whole save, whosever it is, stays until a later one is whole."""
        if self._all.kept is None:
            return []
        return [
            slot
            for slot in self._copies
            if self.complete is None or (h := slot.header()) is None or h.stamp != self.complete
        ]

    def _mark(self, slot: Slot, stamp: Stamp, hashed: Future[str] | None) -> None:
        """Hash the values; the slot is complete."""
        self.doing = "its values are hashed"
        body = self._body
        slot.finish(
            Header(
                stamp=stamp,
                owner=self._rank,
                identity=self._identity,
                layout=self._layout,
                table_bytes=len(body.table),
                table_crc=body.table_crc,
                body_bytes=body.num_bytes,
                body_hash=self.hash_of(slot.image) if hashed is None else hashed.result(),
            )
        )
        self.doing = "its copy is sent"

    def _exchange(self, slot: Slot, marked: Future[None], group: dist.ProcessGroup) -> None:
        self._pacer.start()
        keeper, kept = self._all.keeper, self._all.kept
        sends = [] if keeper is None else [(slot.image, keeper)]
        receives: list[tuple[Tensor, int]] = []
        copy = None
        if kept is not None:
            copy = writable(self._copies, self.complete) or self._copies[0]
            copy.allocate(self._all.kept_bytes)  # it may have been another rank's
            copy.begin()
            receives = [(copy.image, kept)]
        transfer(sends, receives, group, pacer=self._pacer, before_header=marked.result)
        marked.result()
        if copy is not None:
            copy.mark()
