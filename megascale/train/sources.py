"""From which checkpoint a run goes on: in which order those of disk and remote are tried. Pure.

Newest is what was committed last: by the number in the mark, which a copy at the remote shares with
its original. Of the two the one on disk is nearer. A run that went back (a checkpoint was taken
away, or a driver gave states up) must not come to what it went back from by way of the remote: then
only older copies are tried, behind everything that the disk has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Place = Literal["disk", "remote"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint with a readable mark.

    name    of its folder, in its place
    number  of the save, which grows from save to save; 0 where nobody asks
    """

    place: Place
    name: str
    number: int = 0

    @property
    def step(self) -> int:
        return int(self.name.removeprefix("step-").partition(".")[0])


def in_order(disk: Iterable[Saved], remote: Iterable[Saved], *, went_back: bool) -> list[Saved]:
    """What to try, best first."""
    disk, remote = _newest_first(disk), _newest_first(remote)
    if went_back and disk:
        return disk + [copy for copy in remote if copy.number < disk[0].number]
    return sorted(disk + remote, key=lambda saved: (-saved.number, saved.place))


def was_taken_away(last: Saved | None, disk: Iterable[str], remote: Iterable[str]) -> bool:
    """Is what the run saved or loaded last gone, and others are there? Whoever takes the newest
    away wants the run to go on from an earlier state; where all are gone a disk was lost.

    disk, remote  names of what is there, damaged or not
    """
    if last is None:
        return False
    there = set(disk if last.place == "disk" else remote)
    return bool(there) and last.name not in there


def _newest_first(saved: Iterable[Saved]) -> list[Saved]:
    return sorted(saved, key=lambda one: -one.number)
