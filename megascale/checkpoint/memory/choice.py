"""Which save a restart takes, and from whom each rank gets its part. Pure, the same on all ranks.

Invariant: a save is taken only where every rank's part of that very save (an equal stamp) is held
by somebody, whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megascale.checkpoint.memory.slot import Stamp


@dataclass(frozen=True)
class Offer:
    """A rank has the state of `owner` in its slot file `file`."""

    stamp: Stamp
    owner: int
    file: int


@dataclass(frozen=True)
class Source:
    """The rank that has somebody's part, and in which of its files."""

    holder: int
    file: int


@dataclass(frozen=True)
class Choice:
    """A save, and for each rank where its part is: its own slot, or somebody's copy."""

    stamp: Stamp
    sources: tuple[Source, ...]

    def moves(self) -> list[tuple[int, Source]]:
        """(rank, where its part is) for those that have to be sent it, by rank."""
        return [(rank, s) for rank, s in enumerate(self.sources) if s.holder != rank]


def choose(offers: Sequence[Sequence[Offer]]) -> Choice | None:
    """The newest save that can be put together from `offers` [rank]; None where there is none."""
    parts = _parts(offers)
    whole = [stamp for stamp, owners in parts.items() if len(owners) == len(offers)]
    if not whole:
        return None
    newest = max(whole)
    return Choice(newest, tuple(parts[newest][rank] for rank in range(len(offers))))


def why_none(offers: Sequence[Sequence[Offer]]) -> str:
    """What the newest save lacks, in words."""
    parts = _parts(offers)
    if not parts:
        return "no rank holds a complete one"
    newest = max(parts)
    missing = [rank for rank in range(len(offers)) if rank not in parts[newest]]
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"of the newest save (step {newest.step}) nobody holds the part of rank(s) {shown}"


def _parts(offers: Sequence[Sequence[Offer]]) -> dict[Stamp, dict[int, Source]]:
    """Save to owner to who has it: the owner itself if it does, else the lowest rank."""
    parts: dict[Stamp, dict[int, Source]] = defaultdict(dict)
    for holder, own in enumerate(offers):
        for offer in own:
            owners = parts[offer.stamp]
            if offer.owner not in owners or holder == offer.owner:
                owners[offer.owner] = Source(holder, offer.file)
    return parts
