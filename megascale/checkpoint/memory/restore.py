"""Finding a save in the slots of all ranks: which one, and is it whole?

Nothing is taken unchecked: a slot must be of this run and layout, and have the values whose hash it
tells. What fails is left out and the choice made again. How each rank gets its part: `bring.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory.arrangement import Site
from megascale.checkpoint.memory.choice import Choice, Offer, choose, why_none
from megascale.checkpoint.memory.hashing import Hasher
from megascale.checkpoint.memory.slot import Header, Slot

logger = logging.getLogger(__name__)


def find(
    files: Sequence[Slot],
    ranks: Ranks,
    sites: Sequence[Site],
    hasher: Hasher,
    *,
    identity: str,
    layout: str,
    newer_than: int | None,
) -> Choice | None:
    """The newest save of a later step than `newer_than` that is whole. Collective; None on all
    ranks where there is none, and why is logged.

    files  of this rank
    """
    search = _Search(files, ranks, sites, hasher, identity, layout)
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
            return choice


@dataclass
class _Search:
    files: Sequence[Slot]
    ranks: Ranks
    sites: Sequence[Site]
    hasher: Hasher
    identity: str
    layout: str
    good: set[int] = field(default_factory=set)  # files whose values were checked
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
        for file in files - self.good:
            slot = self.files[file]
            header = slot.header()
            if header is not None and slot.is_whole(header, self.hasher):
                self.good.add(file)
            else:
                logger.warning("memory slot %s is damaged and is not used", slot.path)
                self.bad.add(file)
        return not files & self.bad


def _say(ranks: Ranks, level: int, message: str) -> None:
    if ranks.is_writer:
        logger.log(level, message)
