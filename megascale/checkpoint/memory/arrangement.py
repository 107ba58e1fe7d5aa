"""What every rank knows of all: where slots are, who keeps whose copy, what a node needs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.checkpoint.memory.body import Body
from megascale.checkpoint.memory.hashing import num_threads_for, own_cores, share_of_cores
from megascale.checkpoint.memory.partners import Place, describe, keepers
from megascale.checkpoint.memory.room import Need
from megascale.checkpoint.memory.slot import Slot
from megascale.topology import Mesh

_NUM_COPIES = 2  # one is complete at every moment
_MOST_OWN = 8  # slot files that are looked for: an earlier start may have had more


@dataclass(frozen=True)
class Site:
    """What a rank tells of itself.

    files         of its slots; an earlier start may have left some
    cores         that it may run on
    image_bytes, table_crc  of the rank's slots in this layout
    newest_number           of the saves in its slots
    start                   a number that it drew
    """

    place: Place
    files: tuple[str, ...]
    cores: frozenset[int]
    image_bytes: int
    table_crc: int
    newest_number: int
    start: int


def slots_at(prefix: str | None, num_own: int) -> tuple[list[Slot], list[Slot], list[Slot]]:
    """Own slots, those for copies, and own ones of an earlier start that had more."""

    def slot(name: str) -> Slot:
        return Slot(None if prefix is None else Path(f"{prefix}.{name}"))

    own = [slot(f"own{number}") for number in range(num_own)]
    if prefix is None:
        return own, [], []
    former = [slot(f"own{number}") for number in range(num_own, _MOST_OWN)]
    copies = [slot(f"copy{number}") for number in range(_NUM_COPIES)]
    return own, copies, [slot for slot in former if slot.num_bytes]


def site_of(place: Place, body: Body, files: Sequence[Slot]) -> Site:
    headers = [header for slot in files if (header := slot.header())]
    newest = max((header.stamp.number for header in headers), default=0)
    paths = tuple(str(slot.path) for slot in files)
    return Site(
        place,
        paths,
        own_cores(),
        body.image_bytes,
        body.table_crc,
        newest,
        secrets.randbits(63),
    )


@dataclass(frozen=True)
class Arrangement:
    """keeper, kept  ranks: who keeps this rank's copy, and whose copy it keeps
    said         about copies, in a line; None: nothing to say
    needs        the memory of each rank's slots
    num_threads  that hash
    """

    sites: tuple[Site, ...]
    keeper: int | None
    kept: int | None
    said: str | None
    needs: tuple[Need, ...]
    num_threads: int

    @property
    def kept_bytes(self) -> int:
        """Of a slot with a copy."""
        return 0 if self.kept is None else self.sites[self.kept].image_bytes


def arrange(
    sites: Sequence[Site], rank: int, mesh: Mesh, *, on_peers: bool, num_own: int, num_copies: int
) -> Arrangement:
    """The same on all ranks, but for what is `rank`'s own."""
    places = [site.place for site in sites]
    kept_by = keepers(mesh, places) if on_peers else [None] * mesh.world_size
    keeps = {keeper: kept for kept, keeper in enumerate(kept_by) if keeper is not None}
    needs = []
    for other, site in enumerate(sites):
        kept = keeps.get(other)
        copy_bytes = 0 if kept is None else sites[kept].image_bytes
        copies = 0 if kept is None else num_copies
        needs.append(Need(site.place.host, site.image_bytes, num_own, copy_bytes, copies))
    own = sites[rank]
    cores = [site.cores for site in sites if site.place.host == own.place.host]
    return Arrangement(
        sites=tuple(sites),
        keeper=kept_by[rank],
        kept=keeps.get(rank),
        said=describe(mesh, places, kept_by) if on_peers and mesh.world_size > 1 else None,
        needs=tuple(needs),
        num_threads=num_threads_for(share_of_cores(own.cores, cores)),
    )
