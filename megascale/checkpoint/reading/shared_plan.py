"""From files and wants to a plan that all ranks share: what is read and exchanged to make it.

The common case first: as many files as ranks, and all of file r is wanted by rank r, as it is when
a run starts again in the layout that it was saved in. Then a rank reads one header, keeps its file
for itself, and only the few wants that lie elsewhere (replicated and tied parameters) are told to
all. Else the headers, dealt out and read once each, and all wants are gathered, and every rank
plans for all.

A plan is kept (`PlanCache`): a load of another step in the same layout, after a roll-back or a
damaged checkpoint, reads no header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.layout import Entry
from megascale.checkpoint.reading.files import Files
from megascale.checkpoint.reading.outcome import gather
from megascale.checkpoint.reading.plan import (
    Limits,
    Needs,
    RankPlan,
    choose_readers,
    plan_rank,
)
from megascale.checkpoint.reading.saved import Saved, Want, digest

Numbered = tuple[int, Want]
"""Number of the piece at its rank, and what it needs."""


class PlanCache:
    """The plan of the last load, on this rank."""

    def __init__(self) -> None:
        self._kept: tuple[str, RankPlan] | None = None

    def plan(self, files: Files, wants: Sequence[Want], ranks: Ranks, limits: Limits) -> RankPlan:
        """Collective: reused where every rank has the plan of this very load."""
        own = digest(wants), self._kept[0] if self._kept else None
        told = ranks.gather(lambda: own)
        name = "\n".join([files.layout_id(), repr(limits), *(wanted for wanted, _ in told)])
        name = hashlib.sha256(name.encode()).hexdigest()
        if self._kept is None or any(kept != name for _, kept in told):
            self._kept = name, make_plan(files, wants, ranks, limits)
        return self._kept[1]


def make_plan(files: Files, wants: Sequence[Want], ranks: Ranks, limits: Limits) -> RankPlan:
    """Collective. Raises CheckpointError on all ranks: a damaged header, another model."""
    dealt = range(ranks.rank, len(files.names), ranks.num_ranks)
    headers: dict[int, list[Entry]] = {}

    def read() -> list[Numbered] | None:
        headers.update(files.read_headers(dealt))
        return _wants_elsewhere(headers.get(ranks.rank, []), wants)

    elsewhere = gather(ranks, read)
    if len(files.names) == ranks.num_ranks:
        told = [numbered for numbered in elsewhere if numbered is not None]
        if len(told) == ranks.num_ranks:
            plan = _plan_same_layout(headers[ranks.rank], wants, told, ranks, limits)
            if plan is not None:
                return plan
    return _plan_any_layout(files, headers, wants, ranks, limits)


def _wants_elsewhere(entries: list[Entry], wants: Sequence[Want]) -> list[Numbered] | None:
    """What is not in this file; None where something in it is not wanted as it lies there."""
    there = {Want(entry.key, entry.global_shape, entry.box) for entry in entries}
    if not there <= set(wants):
        return None
    return [(piece, want) for piece, want in enumerate(wants) if want not in there]


def _plan_same_layout(
    entries: list[Entry],
    wants: Sequence[Want],
    elsewhere: list[list[Numbered]],
    ranks: Ranks,
    limits: Limits,
) -> RankPlan | None:
    """None where what is wanted from elsewhere was not saved: to be told with all that was."""
    keys = {want.key for numbered in elsewhere for _, want in numbered}
    parts = ranks.gather(lambda: [entry for entry in entries if entry.key in keys])
    # of the keys that are exchanged all is known everywhere, of the others what this rank reads
    saved = Saved({**dict(enumerate(parts)), ranks.rank: entries})
    for _, want in (item for numbered in elsewhere for item in numbered):
        tensor = saved.tensor(want.key)
        if tensor is None or tensor.shape != want.global_shape or not saved.covers(want):
            return None

    def plan() -> RankPlan:
        needs = Needs(saved, limits)
        for rank, numbered in enumerate(elsewhere):
            for piece, want in numbered:
                needs.add(rank, piece, want)
        told = {piece for piece, _ in elsewhere[ranks.rank]}
        for piece, want in enumerate(wants):
            if piece not in told:
                needs.add(ranks.rank, piece, want)
        return plan_rank(needs, {block: block[0] for block in needs.num_bytes}, ranks.rank)

    return _together(ranks, plan)


def _plan_any_layout(
    files: Files,
    headers: dict[int, list[Entry]],
    wants: Sequence[Want],
    ranks: Ranks,
    limits: Limits,
) -> RankPlan:
    told = ranks.gather(lambda: (headers, tuple(wants)))
    saved = Saved({number: part for headers, _ in told for number, part in headers.items()})
    ranks.gather(lambda: saved.refuse_another_model(wants, files.where))
    saved.refuse_unasked({want.key for _, wanted in told for want in wanted}, files.where)

    def plan() -> RankPlan:
        needs = Needs(saved, limits)
        for rank, (_, wanted) in enumerate(told):
            for piece, want in enumerate(wanted):
                needs.add(rank, piece, want)
        return plan_rank(needs, choose_readers(needs), ranks.rank)

    return _together(ranks, plan)


def _together(ranks: Ranks, plan: Callable[[], RankPlan]) -> RankPlan:
    """Each rank its own; where one fails, all raise, and none waits for messages of it."""
    made: list[RankPlan] = []
    ranks.gather(lambda: made.append(plan()))
    return made[0]
