"""A rank's end of its node's loader: a `BatchSource` that copies this rank's share.

Every wait has a deadline and says who is missing: the loader that died, with its last words; the
loader that has been reading one sample for too long; or the ranks of this node that have not taken
an earlier batch, so that there is no room for the next.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import numpy as np

from megascale.data.loader import GlobalBatch, MicroBatch, sample_numbers
from megascale.data.node.filling import Positions
from megascale.data.node.node import Place, start_of
from megascale.data.node.ring import ALL, Ring, Share, stamp
from megascale.data.node.shape import RingShape, offsets
from megascale.data.node.waiting import wait_until
from megascale.env import hostname
from megascale.errors import DataError, LaunchError

_RANK_FOR_ITSELF = "data.loader = 'rank' lets every rank read for itself"


class NodeMemory:
    """The rings of this node, mapped by one of its ranks.

    ranks    global ranks of the node, in the order in which their counters lie
    """

    def __init__(
        self,
        place: Place,
        shapes: Sequence[RingShape],
        ranks: Sequence[int],
        *,
        deadline_s: float,
        ended: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`ended`: the loader's exit code, where somebody knows. Raises LaunchError."""
        self.place, self.ranks, self.deadline_s = place, tuple(ranks), deadline_s
        self._ended = ended
        path = f"/proc/{place.pid}/fd/{place.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise LaunchError(
                f"the node's batches at {path} on {hostname()} cannot be opened "
                f"({error.strerror}); {_RANK_FOR_ITSELF}"
            ) from error
        try:
            self.inode = os.fstat(descriptor).st_ino
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        memory = memoryview(self._map)
        self.rings = [
            Ring(memory[at:], shape) for at, shape in zip(offsets(shapes), shapes, strict=False)
        ]
        assert all(ring.is_ours() for ring in self.rings), path
        memory.release()

    def is_alive(self) -> bool:
        return start_of(self.place.loader) == self.place.started

    def loader(self) -> str:
        """The loader as a person looks for it."""
        code = self._ended()
        how = "" if code is None else f", which exited with {code}"
        return f"the loader of node {hostname()} (process {self.place.loader}{how})"

    def close(self) -> None:
        for ring in self.rings:
            ring.close()
        with suppress(BufferError):  # an error on its way may hold a view: it goes with it
            self._map.close()


class NodeBatches:
    """The batches at `positions`, this data rank's share of each, in one generation of a ring."""

    def __init__(
        self,
        memory: NodeMemory,
        ring: Ring,
        generation: int,
        positions: Positions,
        *,
        global_rank: int,
        dp_rank: int,
    ) -> None:
        self._memory, self._ring, self._generation = memory, ring, generation
        self._positions = positions
        self._reader = memory.ranks.index(global_rank)
        self._dp_rank = dp_rank
        self._share = ring.shape.dp_ranks.index(dp_rank)
        self._batch = 0
        ring.has_read(self._reader, generation, -1)

    def __iter__(self) -> NodeBatches:
        return self

    def __next__(self) -> GlobalBatch:
        first, size, _ = next(self._positions)
        shape = self._ring.shape
        wait_until(self.is_ready, self._look)
        if not self._is_whole():
            self._raise_failure(first)
        num_rows = size // shape.dp_size
        found: list[Share] = []

        def is_copied() -> bool:
            copied = self._ring.copy(self._batch, self._share, num_rows)
            found.extend([copied] if copied is not None else [])
            return bool(found)

        wait_until(is_copied, self._look)
        self._ring.has_read(self._reader, self._generation, self._batch)
        self._batch += 1
        return self._global_batch(first, size, found[0])

    def is_ready(self) -> bool:
        """Whether `next` would not wait: the batch is whole, or it is known to be unreadable."""
        return self._is_whole() or self._ring.failed() in (self._stamp, ALL)

    def close(self) -> None:
        """The ring is closed by who opened it."""

    @property
    def _stamp(self) -> int:
        return stamp(self._generation, self._batch)

    def _is_whole(self) -> bool:
        return self._ring.is_whole(self._generation, self._batch)

    def _global_batch(self, first: int, size: int, share: Share) -> GlobalBatch:
        shape = self._ring.shape
        micro = shape.micro_batch_size
        mask_RS = np.unpackbits(share.mask_bits_RM, axis=1, count=shape.seq_len).view(np.bool_)
        numbers = sample_numbers(first, size, micro, self._dp_rank, shape.dp_size)
        return GlobalBatch(
            first,
            size,
            tuple(
                MicroBatch(
                    windows_BW=share.windows_RW[rows],
                    loss_mask_BS=mask_RS[rows],
                    sample_numbers_B=numbers_B,
                    document_starts_BS=None
                    if share.documents_RS is None
                    else share.documents_RS[rows],
                )
                for numbers_B, rows in (
                    (numbers_B, slice(i * micro, (i + 1) * micro))
                    for i, numbers_B in enumerate(numbers)
                )
            ),
        )

    def _raise_failure(self, first: int) -> NoReturn:
        words, code = self._ring.last_words()
        if code == DataError.exit_code:
            raise DataError(words)
        raise LaunchError(
            f"{self._memory.loader()} failed: {words}; the batch from sample {first} on is missing"
        )

    def _look(self, waited_s: float) -> None:
        """Raise where the loader is gone, or the deadline has passed."""
        if self.is_ready():
            return
        what = f"batch {self._batch} of this rank's loader"
        if not self._memory.is_alive():
            raise LaunchError(
                f"{self._memory.loader()} is gone and left no word: killed, or the node is out of "
                f"memory (`dmesg`); {what} is missing: start the run again with --resume; if it "
                f"happens again, {_RANK_FOR_ITSELF}"
            )
        if waited_s < self._memory.deadline_s:
            return
        least = stamp(self._generation, max(-1, self._batch - self._ring.shape.num_slots))
        words = zip(self._memory.ranks, self._ring.readers(), strict=True)
        behind = [rank for rank, word in words if word < least]
        if behind:
            who = f"rank(s) {', '.join(map(str, behind))} of this node have not taken earlier ones"
        else:
            number, seconds = self._ring.reading()
            who = f"{self._memory.loader()} has been at sample {number} for {seconds:.0f} s"
        raise LaunchError(
            f"{what} did not come in {waited_s:.0f} s: {who}; look at its storage, and at the logs "
            "of the ranks"
        )
