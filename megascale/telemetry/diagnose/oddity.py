"""The ranks of a job that stands still which differ from their peers, where no wait tells more
(ByteRobust 5: the dominant stacks are healthy)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from megascale.telemetry.diagnose.places import UNINTERRUPTIBLE
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
