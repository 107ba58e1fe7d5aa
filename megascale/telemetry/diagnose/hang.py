"""Which ranks hold a job up that stands still (MegaScale 5.2, ByteRobust 5).

Asked up to three times. First with the progress pages alone: a process that is dead, stopped or
silent is the answer, and often the waits have one end. Where the answer is not certain, a second
time with the stacks of the suspects and of some of their peers (`stacks_wanted`), and if that is
not certain either, with everybody's; then that answer is all there is.

The rules, the strongest first:
1. a rank that ended, is stopped, or says nothing in the job's epoch (the faulty ones log nothing,
   those that wait do)
2. a rank whose stack is in no wait, while the others wait
3. the end of the waits (`waiting.py`): everybody waits for it, and it waits for nobody
4. in a circle of waits, who skipped a collective or a send (`circles.py`)
5. where no wait shows on the pages, the few whose place, stack or completed step is another

Sequence numbers count, never the state of a collective: gloo reports one that timed out as done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.events import group_id
from megascale.telemetry.diagnose import stacks as reading
from megascale.telemetry.diagnose.awaited import awaited
from megascale.telemetry.diagnose.circles import in_circle, skipped_by
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.oddity import leaders, odd_ranks
from megascale.telemetry.diagnose.places import (
    DEAD,
    STOPPED,
    RankView,
    body_is_over,
    cannot_wait_for_neighbour,
    may_wait_unseen,
)
from megascale.telemetry.diagnose.stacks import Stand
from megascale.telemetry.diagnose.waiting import Groups, Meeting, Observed, ends, find_waits
from megascale.telemetry.shown import counted
from megascale.topology import AXES, Mesh

__all__ = ["RankView", "covering_group", "localise", "mesh_groups", "stacks_wanted"]

STACKS_A_GROUP = 32


@dataclass(frozen=True)
class _Verdict:
    """Guilty ranks, the rule that found each, and whether to act on it."""

    why: dict[int, str]
    certain: bool


def mesh_groups(mesh: Mesh) -> dict[str, list[tuple[int, ...]]]:
    """Groups of a mesh by the names that spans and pages use: what `localise` takes."""
    groups = {axis: [tuple(ranks) for ranks in mesh.groups(axis)] for axis in AXES}
    groups["embedding"] = [tuple(ranks) for ranks in mesh.embedding_groups()]
    groups["head"] = groups["pipeline"]
    groups["vocabulary"] = [tuple(ranks) for ranks in mesh.vocabulary_groups()]
    groups["world"] = [tuple(range(mesh.world_size))]
    return groups


def localise(
    ranks: Mapping[int, RankView], groups: Groups, stacks: Mapping[int, str] | None = None
) -> Finding:
    """The ranks that hold up a job in which nobody makes progress.

    ranks   one view a global rank; those that are missing here and in a group are silent
    groups  instances of each parallel group by name, as of `mesh_groups`
    stacks  text of `py-spy dump` of any ranks

    `ranks` of the finding is empty where nothing tells the ranks apart: take all stacks.
    """
    dumped = {rank: reading.main_frames(dump) for rank, dump in (stacks or {}).items()}
    views = dict(ranks)
    everyone = sorted({*views, *(r for g in groups.values() for members in g for r in members)})
    verdict = _gone(views, everyone)
    if verdict is None:
        stands = _stands(dumped)
        inputs = {rank: found for rank in stands if (found := awaited(dumped[rank])) is not None}
        known = {rank: views[rank] for rank in everyone}
        seen = Observed(known, groups, stands, set(dumped), inputs)
        verdict = _by_waits(seen) or _by_difference(seen, dumped)
        if dumped and not verdict.why.keys() <= dumped.keys():  # perhaps it has not come yet
            verdict = _Verdict(verdict.why, certain=False)
    guilty = tuple(sorted(verdict.why))
    return Finding(
        kind="hang",
        ranks=guilty,
        evidence=_evidence(verdict, views, dumped, groups),
        step=max((view.step for view in views.values()), default=None),
        group=covering_group(guilty, groups),
        certain=verdict.certain,
    )


def stacks_wanted(finding: Finding, groups: Groups) -> tuple[int, ...]:
    """Ranks whose stacks make an uncertain finding certain: the suspects and members of all their
    groups, at most STACKS_A_GROUP of each; everyone where there are no suspects."""
    everyone = {rank for instances in groups.values() for members in instances for rank in members}
    if not finding.ranks:
        return tuple(sorted(everyone))
    suspects, wanted = set(finding.ranks), set(finding.ranks)
    for instances in groups.values():
        for members in instances:
            if not suspects.isdisjoint(members):
                wanted.update(members[:: -(-len(members) // STACKS_A_GROUP)])
    return tuple(sorted(wanted))


def covering_group(ranks: Sequence[int], groups: Groups) -> str | None:
    """Name of the smallest parallel group of two ranks or more that covers `ranks`."""
    covering = [
        (len(members), place, name)
        for place, (name, instances) in enumerate(groups.items())
        for members in instances
        if len(members) > 1 and ranks and set(ranks) <= set(members)
    ]
    return min(covering)[2] if covering else None


# ---------------------------------------------------------------- rule 1


def _gone(views: Mapping[int, RankView], everyone: Iterable[int]) -> _Verdict | None:
    epoch = max((view.epoch for view in views.values()), default=0)
    why: dict[int, str] = {}
    for rank in everyone:
        view = views.get(rank)
        if view is None:
            why[rank] = "silent"
        elif not view.alive or view.os_state in DEAD:
            why[rank] = "dead"
        elif view.os_state in STOPPED:
            why[rank] = "stopped"
        elif view.epoch < epoch:
            why[rank] = f"silent in epoch {epoch}"
    return _Verdict(why, certain=bool(views)) if why else None


# ---------------------------------------------------------------- rules 2 to 4


def _stands(dumped: Mapping[int, tuple[str, ...]]) -> dict[int, Stand]:
    """What each rank does, by its stack. Without anybody in a wait, a stack in no wait proves
    nothing: perhaps the job moves on."""
    found = {rank: reading.stand(frames) for rank, frames in dumped.items()}
    known = {rank: stand for rank, stand in found.items() if stand is not None}
    alike = next((ranks for _, ranks in reading.clusters(dumped)), ())
    if len(alike) > 2 and len(alike) * 2 > len(dumped):  # whatever it is called: all stand there
        known |= {rank: "other" for rank in alike if known.get(rank) == "busy"}
    return known if any(stand != "busy" for stand in known.values()) else {}


def _by_waits(seen: Observed) -> _Verdict | None:
    num_ranks = max(seen.views) + 1
    waits = find_waits(seen)
    successors = waits.edges(num_ranks)
    waited_for = {after for following in successors for after in following}
    skipped = {rank: meeting for meeting in waits.meetings for rank in meeting.skipped}
    busy: dict[int, str] = {}
    strong: dict[int, str] = {}
    weak: dict[int, str] = {}
    certain = True
    for end in ends(successors):
        rank = end[0]
        if len(end) > 1:
            members = {node for node in end if node < num_ranks}
            inside = [waits.meetings[node - num_ranks] for node in end if node >= num_ranks]
            found, sure = in_circle(seen, members, inside)
            certain = certain and sure
            strong |= found
        elif seen.stands.get(rank) == "busy":
            busy[rank] = "in no wait"
        elif rank in skipped:
            strong[rank] = skipped_by(skipped[rank])
            certain = certain and seen.waits(skipped[rank].front[0])
        elif rank in waited_for and not seen.waits(rank):
            if may_wait_unseen(seen.views[rank]):
                weak[rank] = "waits for nobody, or unseen"
            else:
                strong[rank] = "waits for nobody"
                certain = certain and _stands_alone(seen, waits.meetings, rank)
    if busy:
        return _Verdict(busy, certain=True)
    if strong:
        return _Verdict(strong, certain)
    ahead = leaders(seen) if weak else ()
    if ahead:
        return _Verdict(dict.fromkeys(ahead, "past where all others stand"), certain=False)
    places: dict[object, dict[int, str]] = defaultdict(dict)
    for rank, why in weak.items():
        places[seen.views[rank].place][rank] = why
    return _Verdict(min(places.values(), key=len), certain=False) if places else None


def _stands_alone(seen: Observed, meetings: Sequence[Meeting], rank: int) -> bool:
    """Whether the pages prove that the rank itself stopped, and did not wait for one that skipped
    a collective or a send: no neighbour can owe it anything, several wait for it, and its tensor
    peers are many and further, or stand with it.
    """
    view = seen.views[rank]
    if len(seen.instance.get("pipeline", {}).get(rank, ())) > 1 and not (
        body_is_over(view) or cannot_wait_for_neighbour(view, last_chunk=seen.last_chunk)
    ):
        return False
    if not any(rank in m.missing for m in meetings if len(m.front) > 1):
        return False
    tensor = seen.instance.get("tensor", {}).get(rank, (rank,))
    others = [seen.views[peer] for peer in tensor if seen.views[peer].place != view.place]
    torn = any((o.group_id, o.seq) == (view.group_id, view.seq) for o in others)
    return not torn and (len(tensor) == 1 or len(others) > 1)


# ---------------------------------------------------------------- rule 5


def _by_difference(seen: Observed, dumped: Mapping[int, tuple[str, ...]]) -> _Verdict:
    what, few = odd_ranks(seen, dumped)
    others_wait = all(seen.waits(rank) for rank in seen.views if rank not in few)
    return _Verdict(dict.fromkeys(few, what), certain=bool(few) and others_wait)


# ---------------------------------------------------------------- evidence


def _evidence(
    verdict: _Verdict,
    views: Mapping[int, RankView],
    dumped: Mapping[int, tuple[str, ...]],
    groups: Groups,
) -> dict[str, Any]:
    by_number = {group_id(name): name for name in groups}
    places = {rank: _told(view, by_number) for rank, view in views.items()}
    others = Counter(place for rank, place in places.items() if rank not in verdict.why)
    found: dict[str, Any] = {
        "told": _sentence(verdict.why, places, others),
        "why": {str(rank): why for rank, why in sorted(verdict.why.items())},
        "places": {str(rank): places[rank] for rank in sorted(verdict.why) if rank in places},
        "others": [{"place": place, "ranks": n} for place, n in others.most_common(5)],
    }
    if dumped:
        found["stacks"] = [
            {"top": list(frames[:3]), "ranks": list(alike[:16]), "num_ranks": len(alike)}
            for frames, alike in reading.clusters(dumped)[:8]
        ]
    return found


def _sentence(why: Mapping[int, str], places: Mapping[int, str], others: Counter[str]) -> str:
    """`rank 2: dead, in step 6, forward; 3 others in step 6, backward`."""
    parts = [
        f"rank {rank}: {reason}{f', in {places[rank]}' if rank in places else ''}"
        for rank, reason in sorted(why.items())[:4]
    ]
    parts += [f"{counted(len(why) - 4, 'rank')} more"] * (len(why) > 4)
    parts += [f"{count} others in {place}" for place, count in others.most_common(2)]
    return "; ".join(parts)


def _told(view: RankView, names: Mapping[int, str]) -> str:
    parts = [f"step {view.step}", view.phase]
    if view.chunk is not None:
        parts.append(f"chunk {view.chunk}")
    if view.micro_batch is not None:
        parts.append(f"micro-batch {view.micro_batch}")
    if view.group_id is not None:
        parts.append(f"{names.get(view.group_id, 'pipeline channel')} {view.seq}")
    return ", ".join(parts)
