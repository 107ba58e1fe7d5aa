"""Who may wait for whom in a job that stands still, as a graph, and its ends (MegaScale 5.2).

Nodes are ranks and meetings. A meeting is a collective at which a set of ranks stands, at one
place; each of them leads to it, and it leads to the members of the group that are not known to
have arrived. A rank between pipeline transfers leads to its neighbours. Whoever is followed to the
end of every wait is either in no wait at all, or in a circle of waits, which a program alone never
makes: there somebody skipped a meeting.

Invariant: an edge is left out only where it is known that nothing is waited for. So a rank without
edges waits for nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from megascale.events import group_id
from megascale.telemetry.diagnose.awaited import Awaited, has_sent
from megascale.telemetry.diagnose.places import (
    AHEAD,
    BEHIND,
    UNKNOWN,
    RankView,
    body_is_over,
    cannot_wait_for_neighbour,
    channels,
    coarse_order,
    order,
    waits_in_last_collective,
)
from megascale.telemetry.diagnose.stacks import Stand

Groups = Mapping[str, Sequence[tuple[int, ...]]]


@dataclass
class Meeting:
    """Ranks at one collective of a group, and members that have not come, as far as is known.

    skipped      members that are further, though the others still wait here
    is_transfer  one rank that waits to receive, and the one that is to send
    """

    group: str
    seq: int | None
    front: tuple[int, ...]
    missing: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    is_transfer: bool = False


@dataclass
class Waits:
    """The graph. `meeting_of` and `neighbours` by rank; absent: no such wait."""

    meetings: list[Meeting] = field(default_factory=list)
    meeting_of: dict[int, int] = field(default_factory=dict)
    neighbours: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def edges(self, num_ranks: int) -> list[Sequence[int]]:
        """Successors of each rank, then of each meeting (its number is num_ranks + index)."""
        out: list[Sequence[int]] = []
        for rank in range(num_ranks):
            meeting = self.meeting_of.get(rank)
            via = () if meeting is None else (num_ranks + meeting,)
            out.append((*via, *self.neighbours.get(rank, ())))
        out += [(*m.missing, *m.skipped) for m in self.meetings]
        return out


class Observed:
    """The views of all ranks (0 to n - 1, none missing) with what follows from the groups.

    stands   what ranks do by their stacks; absent: nobody knows
    dumped   ranks with a stack, telling or not
    awaited  what ranks wait to receive, by their stacks
    """

    def __init__(
        self,
        views: Mapping[int, RankView],
        groups: Groups,
        stands: Mapping[int, Stand],
        dumped: set[int],
        awaited: Mapping[int, Awaited] = MappingProxyType({}),
    ) -> None:
        self.awaited = awaited
        self.views, self.groups, self.stands = views, groups, stands
        self.unclear = dumped - stands.keys() if stands else set()
        self.names = {group_id(name): name for name in groups}
        self.instance = {
            name: {rank: members for members in instances for rank in members}
            for name, instances in groups.items()
        }
        self.stage = {
            rank: stage
            for members in groups.get("pipeline", ())
            for stage, rank in enumerate(members)
        }
        self.stages = max((len(members) for members in groups.get("pipeline", ())), default=1)
        self.payload_of = {number: what[2] for number, what in channels(self.stages).items()}
        chunks = [view.chunk for view in views.values() if view.chunk is not None]
        self.last_chunk = max([*chunks, self.stages - 1])

    def group_of(self, rank: int) -> str | None:
        """The group in which the rank waits, as far as is known: by its stack, else that of its
        last collective; None for a pipeline channel or none."""
        stand = self.stands.get(rank)
        if stand is not None:  # where it is not known which group, perhaps everybody
            name = "world" if stand == "other" else stand
            return name if name in self.groups else None
        view = self.views[rank]
        return self.names.get(view.group_id or 0) if waits_in_last_collective(view) else None

    def waits(self, rank: int) -> bool:
        """Known to wait, by its stack."""
        return self.stands.get(rank, "busy") != "busy"

    def compare(self, one: int, other: int) -> int:
        """Is rank `one` AHEAD of or BEHIND rank `other`?"""
        first, second = self.views[one], self.views[other]
        if self.stage.get(one, 0) == self.stage.get(other, 0):
            return order(first, second, payload_of=self.payload_of)
        return coarse_order(first, second)

    def further(self, one: int, other: int) -> int:
        """Which of the two came further, or where their places do not say, moved longer."""
        found = self.compare(one, other)
        if found == UNKNOWN:
            found = AHEAD if self.views[one].age_s <= self.views[other].age_s else BEHIND
        return one if found == AHEAD else other


def find_waits(seen: Observed) -> Waits:
    """The graph of `seen`. Ranks that do not wait, by their stacks, have no edges."""
    waits = Waits()
    for rank in seen.views:
        transfer = _transfer(seen, rank)
        if transfer is not None:
            waits.meetings.append(transfer)
            waits.meeting_of[rank] = len(waits.meetings) - 1
        elif seen.stands.get(rank, "transfer") == "transfer":
            neighbours = _neighbours(seen, rank)
            if neighbours:
                waits.neighbours[rank] = neighbours
    for name, front in _fronts(seen):
        meeting = _meeting(seen, name, front)
        if meeting.missing or meeting.skipped:
            waits.meetings.append(meeting)
            waits.meeting_of |= dict.fromkeys(front, len(waits.meetings) - 1)
    return waits


def ends(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected components that lead nowhere else (Tarjan's algorithm, without
    recursion: a graph of 12,288 ranks is deeper than Python's stack)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    found: list[list[int]] = []
    component: dict[int, int] = {}
    for root in range(len(successors)):
        if root in number:
            continue
        number[root] = low[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(successors[root]))]
        while work:
            node, following = work[-1]
            for after in following:
                if after not in number:
                    number[after] = low[after] = len(number)
                    stack.append(after)
                    on_stack.add(after)
                    work.append((after, iter(successors[after])))
                    break
                if after in on_stack:
                    low[node] = min(low[node], number[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    members: list[int] = []
                    while not members or members[-1] != node:
                        members.append(stack.pop())
                    on_stack.difference_update(members)
                    component |= dict.fromkeys(members, len(found))
                    found.append(members)
    leads_on = {
        component[node]
        for node, following in enumerate(successors)
        for after in following
        if component[node] != component[after]
    }
    return [members for index, members in enumerate(found) if index not in leads_on]


def _fronts(seen: Observed) -> list[tuple[str, tuple[int, ...]]]:
    """Ranks of one instance of a group that stand at one place, their last collective there."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, view in seen.views.items():
        name = seen.group_of(rank) or ""
        members = seen.instance.get(name, {}).get(rank, ())
        if len(members) > 1:  # its first member names an instance: hashing all of 12,288 takes long
            found[name, members[0], *view.place, view.recorded.get(name)].append(rank)
    return [(str(key[0]), tuple(ranks)) for key, ranks in found.items()]


def _meeting(seen: Observed, name: str, front: tuple[int, ...]) -> Meeting:
    """Who is missing where `front` stands. Ranks that are few and further than many skipped this
    meeting: had it taken place, the many would have gone on as well."""
    missing, ahead = [], []
    arrived_there = set(front)
    for rank in seen.instance[name][front[0]]:
        if rank not in arrived_there:
            arrived = _arrived(seen, name, front[0], rank)
            if arrived == BEHIND:
                missing.append(rank)
            elif arrived == AHEAD:
                ahead.append(rank)
    few = seen.waits(front[0]) or 2 * len(ahead) <= len(front)
    skipped = ahead if few and not missing else []
    return Meeting(name, seen.views[front[0]].seq, front, tuple(missing), tuple(skipped))


def _arrived(seen: Observed, name: str, waiter: int, other: int) -> int:
    """Where `other` is, seen from the meeting of `waiter` in group `name`: BEHIND it (or nobody
    knows), at it (UNKNOWN), or AHEAD."""
    here, there = seen.views[waiter], seen.views[other]
    if name in here.recorded and name in there.recorded:
        return _sign(there.recorded[name] - here.recorded[name])
    one_program = seen.stage.get(other) == seen.stage.get(waiter)
    if here.group_id == there.group_id == group_id(name):
        more = (there.seq or 0) - (here.seq or 0)
        if more or not one_program or here.place == there.place:
            return _sign(more)
        return AHEAD if seen.compare(other, waiter) != BEHIND else BEHIND  # not the same collective
    found, stand = seen.compare(other, waiter), seen.stands.get(waiter)
    if found != UNKNOWN or stand is None:
        return found if found == AHEAD else BEHIND
    if stand == "other":
        return UNKNOWN  # nobody knows what it waits for
    if stand != seen.stands.get(other):
        return BEHIND
    return AHEAD if one_program and here.place != there.place else UNKNOWN


def _transfer(seen: Observed, rank: int) -> Meeting | None:
    """The transfer that `rank` waits to receive, by its stack; is its sender past it?"""
    members = seen.instance.get("pipeline", {}).get(rank, ())
    payload = seen.awaited.get(rank)
    if payload in (None, "nothing") or len(members) < 2:
        return None
    step = -1 if payload == "activation" else 1
    other = members[(seen.stage[rank] + step) % len(members)]
    views = seen.views
    sent = has_sent(views[rank], views[other], payload, seen.awaited.get(other), seen.payload_of)
    skipped, missing = ((other,), ()) if sent == AHEAD else ((), (other,))
    return Meeting("pipeline", None, (rank,), missing, skipped, is_transfer=True)


def _neighbours(seen: Observed, rank: int) -> tuple[int, ...]:
    """Neighbours in the pipeline for which `rank` may wait."""
    members = seen.instance.get("pipeline", {}).get(rank, ())
    view = seen.views[rank]
    if len(members) < 2 or body_is_over(view):
        return ()
    if cannot_wait_for_neighbour(view, last_chunk=seen.last_chunk):
        return ()
    stage, stages = seen.stage[rank], len(members)
    wraps = seen.last_chunk >= stages
    around = [s for s in (stage - 1, stage + 1) if wraps or 0 <= s < stages]
    near = {members[s % stages] for s in around} - {rank}
    return tuple(
        other
        for other in sorted(near)
        if seen.views[other].step <= view.step and not body_is_over(seen.views[other])
    )


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
