"""Operations in which ranks wait, and who has come to them, from ongoing events (`ongoing.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.events import Ongoing
from megascale.telemetry.diagnose.ongoing_order import since_ns
from megascale.topology import Mesh

Records = Mapping[int, Ongoing]


@dataclass
class Meeting:
    """One operation of one instance of a group in which somebody waits.

    waiting   stand in it          past      have come to it and stand elsewhere
    missing   have not come, or say nothing
    since_ns  when the first began to wait
    """

    group: str
    members: tuple[int, ...]
    seq: int | None
    waiting: list[int] = field(default_factory=list)
    past: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    since_ns: int = 0

    def __str__(self) -> str:
        return self.group if self.seq is None else f"{self.group} {self.seq}"

    def as_json(self, most: int = 16) -> dict[str, Any]:
        return {
            "group": self.group,
            "seq": self.seq,
            "num_members": len(self.members),
            "num_waiting": len(self.waiting),
            "waiting": self.waiting[:most],
            "missing": self.missing[:most],
        }


def find_meetings(
    records: Records, mesh: Mesh, groups: Mapping[str, Sequence[tuple[int, ...]]]
) -> tuple[Meeting, ...]:
    """The operations in which ranks of `records` wait, in the order in which that began."""
    instance: dict[str, dict[int, tuple[int, ...]]] = {}
    found: dict[tuple[object, ...], Meeting] = {}
    for rank, record in records.items():
        for group, seq, members in _waited_for(rank, record, mesh, groups, instance):
            numbered = seq if seq is not None else (record.name, record.op, record.step)
            meeting = found.setdefault(
                (group, members, numbered),
                Meeting(group, members, seq, since_ns=since_ns(record)),
            )
            meeting.waiting.append(rank)
            meeting.since_ns = min(meeting.since_ns, since_ns(record))
    for meeting in found.values():
        _sort(meeting, records)
    return tuple(sorted(found.values(), key=lambda meeting: meeting.since_ns))


def _waited_for(
    rank: int,
    record: Ongoing,
    mesh: Mesh,
    groups: Mapping[str, Sequence[tuple[int, ...]]],
    instance: dict[str, dict[int, tuple[int, ...]]],
) -> list[tuple[str, int | None, tuple[int, ...]]]:
    """(group, number, members); of the wait for any neighbour, each channel that has come less far
    at the other end."""
    group = record.group or "world"
    if "->" in group:
        return [(group, record.seq, _ends_of(group, rank, mesh))]
    if group == "pipeline" and record.seq is None and record.name in ("pp_finish", "pp_wait"):
        stage = str(mesh.coordinates(rank).pp_rank)
        return [
            (channel, number, _ends_of(channel, rank, mesh))
            for channel, number in record.posted.items()
            if "->" in channel and stage in channel.split(" ", 1)[0].split("->")
        ]
    if group not in instance:
        instance[group] = {r: members for members in groups.get(group, ()) for r in members}
    members = instance[group].get(rank, (rank, *record.peers))
    return [(group, record.seq, members)] if len(members) > 1 else []


def _ends_of(channel: str, rank: int, mesh: Mesh) -> tuple[int, ...]:
    at = mesh.coordinates(rank)
    stages = (int(stage) for stage in channel.split(" ", 1)[0].split("->"))
    return tuple(
        mesh.global_rank(tp_rank=at.tp_rank, dp_rank=at.dp_rank, pp_rank=stage) for stage in stages
    )


def _sort(meeting: Meeting, records: Records) -> None:
    """Of the members that do not wait there, who is past it and who has not come."""
    there = set(meeting.waiting)
    here = records[meeting.waiting[0]]
    for rank in meeting.members:
        if rank in there:
            continue
        record = records.get(rank)
        if record is None:
            meeting.missing.append(rank)
        elif meeting.seq is None:
            (meeting.past if (record.step or 0) > (here.step or 0) else meeting.missing).append(
                rank
            )
        elif _number(record, meeting.group, meeting.seq) >= meeting.seq:
            meeting.past.append(rank)
        else:
            meeting.missing.append(rank)


def _number(record: Ongoing, group: str, otherwise: int) -> int:
    """How far its rank has come in `group`; of a record that does not say, where it stands."""
    if record.posted:
        return record.posted.get(group, 0)
    return record.seq if record.group == group and record.seq is not None else otherwise
