"""In which order checkpoints are tried, and when one was taken away on purpose."""

from __future__ import annotations

import pytest

from megascale.train.sources import Saved, in_order, was_taken_away


def _disk(*numbers: int) -> list[Saved]:
    return [Saved("disk", f"step-{number * 10:08d}", number) for number in numbers]


def _remote(*numbers: int) -> list[Saved]:
    return [Saved("remote", f"step-{number * 10:08d}", number) for number in numbers]


@pytest.mark.parametrize(
    ("disk", "remote", "went_back", "expected"),
    [
        ([3, 4, 5], [2, 4], False, "d5 d4 r4 d3 r2"),
        ([], [2, 4], False, "r4 r2"),  # the disk was lost
        ([1], [2, 4], False, "r4 r2 d1"),  # restored from an old copy
        ([3, 4], [3, 4, 5], True, "d4 d3 r3"),  # 5 was taken away: not back by the other door
        ([3, 4], [5], True, "d4 d3"),
        ([], [4, 5], True, "r5 r4"),  # nothing on disk: better than nothing
        ([], [], False, ""),
    ],
)
def test_order(disk: list[int], remote: list[int], went_back: bool, expected: str) -> None:
    found = in_order(_disk(*disk), _remote(*remote), went_back=went_back)
    assert " ".join(f"{one.place[0]}{one.number}" for one in found) == expected


def test_newest_is_committed_last_not_the_highest_step() -> None:
    """After a roll-back the run saved step 20 again; step 30 is of the abandoned branch."""
    abandoned, again = Saved("disk", "step-00000030", 3), Saved("disk", "step-00000020.1", 4)
    assert in_order([abandoned, again], [], went_back=False) == [again, abandoned]
    assert again.step == 20


@pytest.mark.parametrize(
    ("place", "disk", "remote", "expected"),
    [
        ("disk", ["step-00000020"], [], False),
        ("disk", ["step-00000010"], [], True),
        ("disk", ["step-00000010"], ["step-00000020"], True),  # the copy is what was given up
        ("disk", [], ["step-00000020"], False),  # all are gone: lost, not taken away
        ("remote", ["step-00000010"], ["step-00000020"], False),
        ("remote", ["step-00000010"], ["step-00000010"], True),
    ],
)
def test_taken_away(place: str, disk: list[str], remote: list[str], expected: bool) -> None:
    last = Saved(place, "step-00000020", 2)  # type: ignore[arg-type]
    assert was_taken_away(last, disk, remote) is expected
    assert not was_taken_away(None, disk, remote)
