"""A save that was found, into the live state of every rank (MegaScale 4.4; its part is a copy's
where a rank came to a new node).

A rank that has its own slot reads it. Else the part comes from its keeper: out of the keeper's
slot file where that can be mapped (one host), over connections of their own (`serving.py`) where
the keeper is reached, over the control group where it is not; which, and how fast, is said. What is
sent is hashed as it arrives, before training goes on: nobody reads it again for that. The keeper
has read it twice: a slot is hashed before it is chosen (`restore.py`), then sent.

Measured, 1 GiB over loopback on two cores for both ends: 2.9 to 3.3 GB/s over a gloo group, which
one thread carries; 2.1, 2.5 and 4.6 GB/s over 1, 2 and 4 connections.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory.arrangement import Site
from megascale.checkpoint.memory.body import Body
from megascale.checkpoint.memory.choice import Choice
from megascale.checkpoint.memory.fetching import (
    MAX_THREADS,
    MIN_THREADS,
    Mapped,
    Sent,
    Source,
    fill,
)
from megascale.checkpoint.memory.serving import Address, Connection, Server, reachable
from megascale.checkpoint.memory.slot import Slot
from megascale.checkpoint.memory.transfer import transfer
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)
WAYS = ("mapped", "connections", "group")


class HalfRestoredError(CheckpointError):
    """The live state was written over in part: it must be filled from elsewhere, or not be used."""


@dataclass(frozen=True)
class _Told:
    """By a rank, of what it gives and how it can get its own.

    address    where it serves; None: nobody needs it
    hashes     of the values in its files that are sent
    is_mapped  it has mapped its keeper's file
    """

    address: Address | None
    hashes: dict[int, str]
    is_mapped: bool


def bring(
    choice: Choice,
    files: Sequence[Slot],
    ranks: Ranks,
    sites: Sequence[Site],
    body: Body,
    *,
    num_threads: int,
    device: torch.device,
    ways: Sequence[str] = WAYS,
) -> None:
    """Fill the pieces of `body` with this rank's part. Collective.

    files  of this rank, its own first
    ways   that a part may take to a rank that has none

    Raises CheckpointError on all ranks where a part cannot be had, and HalfRestoredError where that
    is known only when pieces were written already.
    """
    delivery = _Delivery(choice, files, ranks, sites, body, num_threads, device, ways)
    try:
        delivery.run()
    finally:
        delivery.close()


class _Delivery:
    def __init__(
        self,
        choice: Choice,
        files: Sequence[Slot],
        ranks: Ranks,
        sites: Sequence[Site],
        body: Body,
        num_threads: int,
        device: torch.device,
        ways: Sequence[str],
    ) -> None:
        self._choice, self._files, self._ranks, self._sites = choice, files, ranks, sites
        self._body, self._device, self._ways = body, device, ways
        self._num_threads = max(MIN_THREADS, min(num_threads, MAX_THREADS))
        self._source = choice.sources[ranks.rank]
        self._moves = choice.moves()
        self._server: Server | None = None
        self._mapped: Slot | None = None  # of the keeper
        self._hosts: list[str] = []  # where the keeper was reached
        self._num_connections = 0
        self._told: list[_Told] = []

    def run(self) -> None:
        if self._moves:
            self._told = self._ranks.gather(self._prepare)
            self._send_over_group(self._ranks.gather(self._connect))
        try:
            ways = self._ranks.gather(self._fill)
        except CheckpointError as error:
            raise HalfRestoredError(str(error)) from error
        if self._moves and self._ranks.is_writer:
            names = ", ".join(str(to) for to, _ in self._moves)
            how = "; ".join(f"rank {to} {ways[to]}" for to, _ in self._moves[:8])
            logger.info("rank(s) %s got their memory slots from their keepers: %s", names, how)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @property
    def _is_sent(self) -> bool:
        return self._source.holder != self._ranks.rank

    def _same_host(self, other: int) -> bool:
        return self._sites[other].place.host == self._sites[self._ranks.rank].place.host

    def _prepare(self) -> _Told:
        """Serve what others need; look whether the own part can be mapped."""
        rank = self._ranks.rank
        hashes, address = {}, None
        for to, source in self._moves:
            if source.holder == rank:
                header = self._files[source.file].header()
                assert header is not None, (to, source)
                hashes[source.file] = header.body_hash
        if hashes and "connections" in self._ways:
            paths = [slot.path for slot in self._files]
            alone = all(self._same_host(to) for to, s in self._moves if s.holder == rank)
            self._server = Server(paths, loopback_only=alone)
            address = self._server.address
        return _Told(address, hashes, self._is_sent and self._map())

    def _map(self) -> bool:
        holder = self._source.holder
        if "mapped" not in self._ways or not self._same_host(holder):
            return False
        slot = Slot(Path(self._sites[holder].files[self._source.file]))
        try:
            header = slot.header()
        except OSError:  # another container's
            return False
        if header is None or (header.stamp, header.owner) != (
            self._choice.stamp,
            self._ranks.rank,
        ):
            return False
        self._mapped = slot
        return True

    def _connect(self) -> bool:
        """Is a way found for this rank's part?"""
        if not self._is_sent or self._mapped is not None:
            return True
        holder = self._source.holder
        address = self._told[holder].address
        if address is not None:
            self._hosts = reachable(
                address, self._source.file, holder, same_host=self._same_host(holder)
            )
        return bool(self._hosts)

    def _send_over_group(self, has_way: Sequence[bool]) -> None:
        """For ranks whose keeper is not reached otherwise: into a slot of theirs."""
        moves = [(to, source) for to, source in self._moves if not has_way[to]]
        if not moves:
            return
        if "group" not in self._ways:
            raise CheckpointError(f"rank {moves[0][0]} does not reach rank {moves[0][1].holder}")
        rank = self._ranks.rank
        is_sent = not has_way[rank]
        given = {s.file for s in self._choice.sources if s.holder == rank}
        slot = self._files[next(file for file in (0, 1) if file not in given)]
        if is_sent:
            logger.warning(
                "rank %d does not reach rank %d at %s: its state comes over the control group",
                rank,
                self._source.holder,
                self._told[self._source.holder].address,
            )
        self._ranks.gather(lambda: self._make_room(slot) if is_sent else None)
        group = self._ranks.group
        assert group is not None
        sends = [(self._files[s.file].image, to) for to, s in moves if s.holder == rank]
        receives = [(slot.image, self._source.holder)] if is_sent else []
        self._ranks.gather(lambda: transfer(sends, receives, group))
        if is_sent:
            slot.mark()
            self._mapped = slot

    def _make_room(self, slot: Slot) -> None:
        slot.allocate(self._sites[self._ranks.rank].image_bytes)
        slot.begin()

    def _fill(self) -> str:
        """What was done, in words."""
        since = time.monotonic()
        body_hash = None
        if self._is_sent:
            body_hash = self._told[self._source.holder].hashes[self._source.file]
        fill(
            self._body,
            self._open_source,
            body_hash=body_hash,
            num_threads=self._num_threads,
            device=self._device,
        )
        seconds = time.monotonic() - since
        how = "read its own"
        if self._hosts:
            how = f"over {self._num_connections} connections to {', '.join(self._hosts)}"
        elif self._mapped is not None:
            how = f"out of {self._mapped.path}"
        num_bytes = self._body.num_bytes
        return (
            f"{how} ({num_bytes:,} bytes in {seconds:.2f} s, {num_bytes / seconds / 1e9:.2f} GB/s)"
        )

    def _open_source(self, thread: int) -> Source:
        if self._hosts:
            holder = self._source.holder
            address = self._told[holder].address
            assert address is not None
            self._num_connections = max(self._num_connections, thread + 1)
            host = self._hosts[thread % len(self._hosts)]
            return Sent(
                Connection(host, address, self._source.file, holder), first=self._body.start
            )
        slot = self._mapped or self._files[self._source.file]
        return Mapped(slot.image[self._body.start :], in_buffer=self._device.type == "cuda")
