"""Which save a restart takes, and where each rank's part comes from."""

from __future__ import annotations

import random

from megascale.checkpoint.memory.choice import Offer, Source, choose, why_none
from megascale.checkpoint.memory.slot import Stamp


def stamp(number: int, *, start: int = 1, epoch: int = 1) -> Stamp:
    return Stamp(epoch, number, start, number, 8 * number)


def test_the_newest_that_all_have() -> None:
    offers = [
        [Offer(stamp(4), 0, 0), Offer(stamp(5), 0, 1)],
        [Offer(stamp(4), 1, 0), Offer(stamp(3), 1, 1)],
    ]
    choice = choose(offers)
    assert choice is not None
    assert choice.stamp == stamp(4)
    assert choice.sources == (Source(0, 0), Source(1, 0))
    assert choice.moves() == []


def test_a_lost_rank_gets_its_part_from_its_keeper() -> None:
    offers = [[Offer(stamp(4), 0, 1), Offer(stamp(4), 1, 2)], []]
    choice = choose(offers)
    assert choice is not None
    assert choice.moves() == [(1, Source(0, 2))]


def test_its_own_slot_comes_before_a_copy() -> None:
    offers = [[Offer(stamp(4), 0, 1), Offer(stamp(4), 1, 2)], [Offer(stamp(4), 1, 0)]]
    choice = choose(offers)
    assert choice is not None
    assert choice.moves() == []


def test_equal_steps_of_two_starts_are_not_mixed() -> None:
    offers = [[Offer(stamp(4, start=1), 0, 0)], [Offer(stamp(4, start=2), 1, 0)]]
    assert choose(offers) is None
    assert why_none(offers) == "of the newest save (step 4) nobody holds the part of rank(s) 0"


def test_nothing_at_all() -> None:
    assert choose([[], []]) is None
    assert why_none([[], []]) == "no rank holds a complete one"


def test_a_later_save_comes_first_though_its_step_is_earlier() -> None:
    later = Stamp(2, 9, 3, 2, 16)
    offers = [[Offer(stamp(8), 0, 0), Offer(later, 0, 1)]]
    choice = choose(offers)
    assert choice is not None
    assert choice.stamp == later


def test_double_buffering_loses_a_save_at_most() -> None:
    """Ranks that write the older of two slots, are stopped anywhere in save n, and only begin save
    n when save n - 1 is complete on all: n or n - 1 is found."""
    for seed in range(300):
        rng = random.Random(seed)
        world_size, newest = rng.randint(1, 6), rng.randint(3, 9)
        offers = []
        for rank in range(world_size):
            slots = {newest - 1: stamp(newest - 1), newest - 2: stamp(newest - 2)}
            progress = rng.choice(["not begun", "torn", "complete"])
            if progress != "not begun":
                del slots[newest - 2]
            if progress == "complete":
                slots[newest] = stamp(newest)
            offers.append([Offer(s, rank, number % 2) for number, s in slots.items()])
        choice = choose(offers)
        assert choice is not None
        assert choice.stamp.number in (newest - 1, newest)
