"""Finding a save in the slots of all ranks, and getting each rank its part.

Nothing is taken unchecked: a slot must be of this run and layout, and have the values whose CRC-32
it tells. What fails is left out and the choice made again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory.choice import Choice, Offer, choose, why_none
from megascale.checkpoint.memory.slot import Header, Slot, Stamp
from megascale.checkpoint.memory.transfer import transfer
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Site:
    """What every rank knows of each.

    image_bytes, table_crc  of the rank's slots in this layout
    newest_number           of the saves in its slots
    start                   a number that it drew
    """

    node: str
    image_bytes: int
    table_crc: int
    newest_number: int
    start: int


def find(
    files: Sequence[Slot],
    ranks: Ranks,
    sites: Sequence[Site],
    *,
    identity: str,
    layout: str,
    newer_than: int | None,
) -> tuple[Stamp, Slot] | None:
    """The newest save of a later step than `newer_than`, and the slot that has this rank's part of
    it. Collective; None on all ranks where there is none, and why is logged.

    files  of this rank, its own two first; what is sent to it goes to one of those
    """
    search = _Search(files, ranks, sites, identity, layout)
    while True:
        told = ranks.gather(search.offers)
        offers = [own for own, _ in told]
        choice = choose(offers)
        if choice is None:
            refused = Counter(reason for _, reasons in told for reason in reasons)
            said = [why_none(offers), *(f"{n} slot(s) {why}" for why, n in refused.items())]
            _say(ranks, logging.WARNING, f"memory slots are not used: {'; '.join(said)}")
            return None
        step = choice.stamp.step
        if newer_than is not None and step <= newer_than:
            told_steps = f"step {step}, the newest checkpoint on disk is of step {newer_than}"
            _say(ranks, logging.INFO, f"memory slots are not used: they hold {told_steps}")
            return None
        if all(search.check(choice)):
            break
    try:
        return choice.stamp, search.bring(choice)
    except CheckpointError as error:
        _say(ranks, logging.WARNING, f"memory slots are not used: {error}")
        return None


@dataclass
class _Search:
    files: Sequence[Slot]
    ranks: Ranks
    sites: Sequence[Site]
    identity: str
    layout: str
    bad: set[int] = field(default_factory=set)  # files whose values are not what was saved

    def offers(self) -> tuple[list[Offer], list[str]]:
        """What this rank can give, and why not the rest."""
        offers, refused = [], []
        for file, slot in enumerate(self.files):
            header = slot.header()
            if header is None or file in self.bad:
                continue
            why = self._refusal(header)
            if why is None:
                offers.append(Offer(header.stamp, header.owner, file))
            else:
                refused.append(why)
        return offers, refused

    def _refusal(self, header: Header) -> str | None:
        if header.identity != self.identity:
            return "of another run, or of this one with another model, data, seed or optimizer"
        owner = header.owner
        if header.layout != self.layout or owner >= len(self.sites):
            return f"of another layout ({header.layout}; now {self.layout})"
        site = self.sites[owner]
        if (header.image_bytes, header.table_crc) != (site.image_bytes, site.table_crc):
            return "of another layout (parameters are cut otherwise)"
        return None

    def check(self, choice: Choice) -> list[bool]:
        """Has each rank what it is to give? Files whose values are not what was saved are not
        offered again. Collective."""
        return self.ranks.gather(lambda: self._check_own(choice))

    def _check_own(self, choice: Choice) -> bool:
        files = {s.file for s in choice.sources if s.holder == self.ranks.rank}
        for file in files:
            slot = self.files[file]
            header = slot.header()
            if header is None or not slot.is_whole(header):
                logger.warning("memory slot %s is damaged and is not used", slot.path)
                self.bad.add(file)
        return not files & self.bad

    def bring(self, choice: Choice) -> Slot:
        """The slot with this rank's part, sent to it where another has it. Collective; raises
        CheckpointError on all ranks."""
        rank, moves = self.ranks.rank, choice.moves()
        source = choice.sources[rank]
        if not moves:
            return self.files[source.file]
        is_sent = source.holder != rank
        given = {s.file for s in choice.sources if s.holder == rank}
        free = next(file for file in (0, 1) if file not in given)
        slot = self.files[free if is_sent else source.file]
        self.ranks.gather(lambda: self._make_room(slot) if is_sent else None)
        assert self.ranks.group is not None
        transfer(
            [(self.files[s.file].image, to) for to, s in moves if s.holder == rank],
            [(slot.image, source.holder)] if is_sent else [],
            self.ranks.group,
        )
        if is_sent:
            slot.mark()
        self.ranks.gather(lambda: self._check_sent(slot, choice) if is_sent else None)
        names = ", ".join(str(to) for to, _ in moves)
        _say(self.ranks, logging.INFO, f"rank(s) {names} got their memory slots from their keepers")
        return slot

    def _make_room(self, slot: Slot) -> None:
        slot.allocate(self.sites[self.ranks.rank].image_bytes)
        slot.begin()

    def _check_sent(self, slot: Slot, choice: Choice) -> None:
        header = slot.header()
        if header is None or header.stamp != choice.stamp or not slot.is_whole(header):
            slot.begin()
            raise CheckpointError(f"{slot.path} is not what its keeper had")


def _say(ranks: Ranks, level: int, message: str) -> None:
    if ranks.is_writer:
        logger.log(level, message)
