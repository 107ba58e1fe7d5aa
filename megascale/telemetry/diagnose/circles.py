"""Who broke a circle of waits: a program alone never makes one (MegaScale 5.2).

Somebody skipped a meeting of the circle. The strongest sign is a rank that is past the send that
its neighbour waits for; then one that is missing from a collective which is complete but for it,
best of all one that is further than those who wait there. In a circle of transfers alone the first
to wait is the one whose input was not sent, and the last is the one that did not send it: it went
on until it needed something itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from megascale.telemetry.diagnose.places import AHEAD, BEHIND, UNINTERRUPTIBLE
from megascale.telemetry.diagnose.waiting import Meeting, Observed


def skipped_by(meeting: Meeting) -> str:
    if meeting.is_transfer:
        return f"past the send that its neighbour, rank {meeting.front[0]}, waits for"
    return f"skipped a collective of {meeting.group}, where {len(meeting.front)} wait"


def in_circle(
    seen: Observed, members: set[int], meetings: Sequence[Meeting]
) -> tuple[dict[int, str], bool]:
    """Suspects among the ranks of a circle, each with why, and whether to act on it.

    members   ranks in the circle
    meetings  the collectives and transfers in it
    """
    asleep = {rank for rank in members if seen.views[rank].os_state == UNINTERRUPTIBLE}
    if asleep:
        return dict.fromkeys(asleep, "uninterruptible"), False
    unsent = {m.skipped[0]: skipped_by(m) for m in meetings if m.is_transfer and m.skipped}
    if unsent:
        return unsent, len(unsent) == 1
    skipped = [
        (len(absent), absent, meeting)
        for meeting in meetings
        if not meeting.is_transfer
        if (absent := tuple(r for r in (*meeting.missing, *meeting.skipped) if r in members))
        and all(seen.compare(r, meeting.front[0]) != BEHIND for r in absent)
    ]
    all_wait = all(seen.waits(rank) for rank in members)
    unclear = members & seen.unclear
    if unclear and unclear < members:
        return dict.fromkeys(unclear, "in no known wait"), False
    if skipped:
        fewest = min(number for number, _, _ in skipped)
        best = [(absent, meeting) for number, absent, meeting in skipped if number == fewest]
        ahead = [
            (absent, meeting)
            for absent, meeting in best
            if all(seen.compare(r, meeting.front[0]) == AHEAD for r in absent)
        ]
        chosen = ahead or best
        why = {rank: skipped_by(meeting) for absent, meeting in chosen for rank in absent}
        if len(why) == 2 and fewest == 1 and all_wait:  # each of two says it of the other
            why = {rank: why[rank] for rank in [seen.further(*why)]}
        return why, all_wait and len(why) == fewest
    if len(meetings) == len(members) and all(meeting.is_transfer for meeting in meetings):
        last = min(members, key=lambda rank: seen.views[rank].age_s)
        return {last: "the last to wait in a circle of transfers, one of which was not sent"}, False
    computing = {r for r in members if seen.views[r].phase not in ("send", "recv")}
    suspects = computing if computing and not all_wait else members
    return dict.fromkeys(suspects, "in a circle of waits"), False
