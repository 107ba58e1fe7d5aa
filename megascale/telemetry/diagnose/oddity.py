"""The ranks of a job that stands still which differ from their peers, where no wait tells more
(ByteRobust 5: the dominant stacks are healthy)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from megascale.telemetry.diagnose.places import (
    AHEAD,
    UNINTERRUPTIBLE,
    coarse_order,
    may_wait_unseen,
)
from megascale.telemetry.diagnose.waiting import Observed

Looks = tuple[str, Sequence[Sequence[int]], Mapping[int, object]]


def odd_ranks(seen: Observed, dumped: Mapping[int, tuple[str, ...]]) -> tuple[str, list[int]]:
    """(How they differ, ranks) from the others of their tensor group, of their stage, of the job;
    no ranks where nobody differs. dumped: frames of stacks by rank."""
    stages: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(seen.views):
        stages[seen.stage.get(rank, 0)].append(rank)
    tensor = [list(members) for members in seen.groups.get("tensor", ()) if len(members) > 1]
    of_stage, of_job = [*stages.values()], [[*seen.views]]
    places = {rank: view.place for rank, view in seen.views.items()}
    frozen = {rank: view.os_state == UNINTERRUPTIBLE for rank, view in seen.views.items()}
    completed = {
        rank: view.completed_step
        for rank, view in seen.views.items()
        if view.completed_step is not None
    }
    looks: list[Looks] = [
        ("uninterruptible", of_job, frozen),
        ("at another place", tensor, places),
        ("with another stack", tensor, dumped),
        ("at another place", of_stage, places),
        ("with another stack", of_stage + of_job, dumped),
        ("behind on its device", of_stage, completed),
    ]
    for what, sets, values in looks:
        few = [
            rank
            for ranks in sets
            for rank in _few(seen, {r: values[r] for r in ranks if r in values})
        ]
        if few:
            return what, sorted(set(few))
    return "", []


def leaders(seen: Observed) -> list[int]:
    """The few that are past a part of the step in which all others stand: of one that holds others
    up, many are past it, so here the few did not wait for what the many wait for."""
    parts = Counter((view.step, view.phase) for view in seen.views.values())
    common, count = parts.most_common(1)[0]
    few = [rank for rank, view in seen.views.items() if (view.step, view.phase) != common]
    if not few or 2 * len(few) >= count:
        return []
    many = [view for view in seen.views.values() if (view.step, view.phase) == common]
    if not may_wait_unseen(many[0]):
        return []
    places = {(view.phase, view.group_id): view for view in many}  # one of each is enough
    is_past = all(
        coarse_order(seen.views[rank], view) == AHEAD for rank in few for view in places.values()
    )
    return few if is_past else []


def _few(seen: Observed, values: Mapping[int, object]) -> list[int]:
    """Ranks whose value is not the common one, where that of more than half is. Of two that both
    wait, the one that is further, or else was moving longer: it waits where the other did not."""
    if not values:
        return []
    common, count = Counter(values.values()).most_common(1)[0]
    if count == len(values):
        return []
    if 2 * count > len(values):
        return [rank for rank, value in values.items() if value != common]
    if len(values) != 2 or not all(seen.waits(rank) for rank in values):
        return []
    return [seen.further(*values)]
