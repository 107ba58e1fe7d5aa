"""Who holds a job up, from what ranks recorded at the deadline of a collective (MegaScale 5.2).

A rank that waits says in which operation of which group, and how far it has come in every group;
so for each operation it is known who has come to it and who has not. Ranks lead to the operation
they wait in, operations lead to the members that have not come, and the ends of these ways are the
answer, the strongest first:

1. a rank without a record: it is stopped, dead, in the kernel, or computes
2. an operation to which all have come and which does not end: the member that is somewhere else
   under the same number, or past it, left it out; a member whose peers are all past it has gone on
   since and is silent now; where all stand there, the transport holds them
3. a circle, which a program alone never makes: the one that is furthest left out what the others
   wait for

What only waits is never an end. `hang.py` asks the same of progress pages and stacks while a job
runs under a driver; the records need neither, and outlive the processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.hang import covering_group, mesh_groups
from megascale.telemetry.diagnose.ongoing_meetings import Meeting, Records, find_meetings
from megascale.telemetry.diagnose.ongoing_order import is_further, place, since_ns
from megascale.telemetry.diagnose.waiting import ends
from megascale.telemetry.shown import counted
from megascale.topology import Mesh

OF_PEERS = ("timed out", "timeout", "connection", "peer", "socket", "nccl", "gloo", "abort")
"""Words of the errors that others cause; any other error is the rank's own."""

MATES = 16  # others of its stage that a rank's numbers are compared with


@dataclass(frozen=True)
class Stall:
    """The answer, and all operations in which somebody waits, the first to be waited for first."""

    finding: Finding
    meetings: tuple[Meeting, ...]


def stalled(records: Records, mesh: Mesh) -> Stall | None:
    """Who holds up the ranks of `records`, which stood in these operations when last heard of;
    None where nobody waits. Times of all ranks are on one clock, errors of it some milliseconds."""
    if not records:
        return None
    groups = mesh_groups(mesh)
    meetings = find_meetings(records, mesh, groups)
    found, certain = _own_errors(records), True
    if not found:
        found, certain = _by_ends(records, meetings, mesh)
    why = {rank: reason for rank, (reason, _) in found.items()}
    guilty = tuple(sorted(why))
    proofs = {id(meeting) for _, meeting in found.values()}
    first = next((m for m in meetings if id(m) in proofs), None) or _first_for(guilty, meetings)
    evidence = {
        "told": _sentence(why, first, len(records), mesh.world_size),
        "why": {str(rank): why[rank] for rank in guilty[:64]},
        "collective": None if first is None else first.as_json(),
        "num_waiting": len(records),
        "num_silent": mesh.world_size - len(records),
    }
    step = max((r.step for r in records.values() if r.step is not None), default=None)
    group = covering_group(guilty, groups)
    return Stall(Finding("hang", guilty, evidence, step, group, certain), meetings)


# ---------------------------------------------------------------- who it is


Suspects = dict[int, tuple[str, Meeting | None]]
"""Guilty ranks, each with why and the operation that shows it, where that is known."""


def _own_errors(records: Records) -> Suspects:
    """Ranks that left their collective with an error that no peer causes."""
    return {
        rank: (f"failed by itself: {record.error}", None)
        for rank, record in records.items()
        if record.error and not any(word in record.error.lower() for word in OF_PEERS)
    }


def _by_ends(records: Records, meetings: Sequence[Meeting], mesh: Mesh) -> tuple[Suspects, bool]:
    """The suspects, and whether to act on it."""
    num_ranks = mesh.world_size
    silent: Suspects = {rank: ("silent", None) for rank in range(num_ranks) if rank not in records}
    if silent:
        return silent, 2 * len(silent) <= num_ranks
    found: Suspects = {}
    for end in ends(_ways(records, meetings, num_ranks)):
        inside = [meetings[node - num_ranks] for node in end if node >= num_ranks]
        if len(end) > 1:
            ranks = {node for node in end if node < num_ranks}
            found |= _in_circle(records, ranks, inside, mesh)
        elif inside:
            (meeting,) = inside
            found |= {rank: (why, meeting) for rank, why in _left_out(records, meeting).items()}
    return found, len(found) == 1


def _ways(records: Records, meetings: Sequence[Meeting], num_ranks: int) -> list[Sequence[int]]:
    """Successors of each rank, then of each meeting (its node is num_ranks + index)."""
    out: dict[int, list[int]] = defaultdict(list)
    for index, meeting in enumerate(meetings):
        several = "->" in meeting.group
        for rank in meeting.waiting:
            if meeting.missing or not several or "->" in (records[rank].group or ""):
                out[rank].append(num_ranks + index)
    return [*(out[rank] for rank in range(num_ranks)), *(m.missing for m in meetings)]


def _left_out(records: Records, meeting: Meeting) -> dict[int, str]:
    """All have come to `meeting`, and it does not end."""
    if "->" in meeting.group:
        source, destination = meeting.members
        if source in meeting.past and destination in meeting.waiting:
            return {source: f"past the send {meeting} that rank {destination} waits for"}
        return {}
    places = Counter(place(records[rank]) for rank in meeting.waiting)
    if len(places) > 1:
        return _odd_one(records, meeting, places)
    front = max(meeting.waiting, key=lambda rank: since_ns(records[rank]))
    gone_on = min((since_ns(records[rank]) for rank in meeting.past), default=0)
    told_ns = max(records[rank].t_ns for rank in meeting.waiting)
    if len(meeting.waiting) <= len(meeting.past) and gone_on > told_ns:
        return dict.fromkeys(meeting.waiting, f"went on from {meeting} and is silent since")
    further = [rank for rank in meeting.past if is_further(records[rank], records[front])]
    return dict.fromkeys(further, f"skipped {meeting}, where {len(meeting.waiting)} wait")


def _odd_one(
    records: Records, meeting: Meeting, places: Counter[tuple[object, ...]]
) -> dict[int, str]:
    """Of ranks in different operations under one number, the few; of two, the further one."""
    (common, count), (_, next_count) = places.most_common(2)
    few = [rank for rank in meeting.waiting if place(records[rank]) != common]
    if count == next_count:
        one, other = (next(r for r in meeting.waiting if place(records[r]) == p) for p in places)
        ahead = one if is_further(records[one], records[other]) else other
        few = [r for r in meeting.waiting if place(records[r]) == place(records[ahead])]
    return dict.fromkeys(few, f"at another operation than its peers under {meeting}: skipped one")


def _in_circle(
    records: Records, members: set[int], meetings: Sequence[Meeting], mesh: Mesh
) -> Suspects:
    """The members that left out what the others of the circle wait for: those that have come less
    far there than others of their stage and no less elsewhere; else the fewest that are missing
    somewhere and further than those who wait there; where several are, the last to wait."""
    options = []
    for meeting in meetings:
        absent = [rank for rank in meeting.missing if rank in members]
        front = records[meeting.waiting[0]]
        ahead = [rank for rank in absent if is_further(records[rank], front)]
        short = [rank for rank in absent if _lacks(records, rank, meeting.group, mesh)]
        if absent:
            last_ns = max(since_ns(records[rank]) for rank in absent)
            signs = (short != absent, ahead != absent, len(absent), -last_ns)
            options.append((signs, meeting, absent))
    if not options:
        return {}
    _, meeting, absent = min(options, key=lambda option: option[0])
    return dict.fromkeys(absent, (f"skipped {meeting}, where {len(meeting.waiting)} wait", meeting))


def _lacks(records: Records, rank: int, group: str, mesh: Mesh) -> bool:
    """Ranks of a stage run one program, so none has come less far in one group than another and
    further, or as far in its program, elsewhere; but where it left out an operation."""
    own, at = records[rank], mesh.coordinates(rank)
    for step in range(1, min(MATES, mesh.tensor * mesh.data - 1) + 1):
        tp_rank = (at.tp_rank + step) % mesh.tensor
        dp_rank = (at.dp_rank + (at.tp_rank + step) // mesh.tensor) % mesh.data
        mate = records.get(mesh.global_rank(tp_rank=tp_rank, dp_rank=dp_rank, pp_rank=at.pp_rank))
        if mate is None or own.posted.get(group, 0) >= mate.posted.get(group, 0):
            continue
        more = (number > mate.posted.get(name, 0) for name, number in own.posted.items())
        if place(mate) == place(own) or any(more):
            return True
    return False


def _first_for(guilty: Sequence[int], meetings: Sequence[Meeting]) -> Meeting | None:
    """The operation that was waited in first for a guilty rank."""
    wanted = set(guilty)
    return next((m for m in meetings if not wanted.isdisjoint(m.missing)), None) or next(
        (m for m in meetings if not wanted.isdisjoint(m.members)), next(iter(meetings), None)
    )


def _sentence(why: Mapping[int, str], first: Meeting | None, waiting: int, num_ranks: int) -> str:
    parts = [f"rank {rank}: {reason}" for rank, reason in sorted(why.items())[:4]]
    parts += [f"{counted(len(why) - 4, 'rank')} more"] * (len(why) > 4)
    if first is not None:
        came = len(first.members) - len(first.missing)
        parts.append(f"{came} of {len(first.members)} came to {first}")
        if not why:
            parts.append("nobody is missing: the transport, or a rank that says it came")
    parts.append(f"{waiting} of {num_ranks} ranks {'waits' if waiting == 1 else 'wait'}")
    return "; ".join(parts)
