"""What is remembered is made once a key, stays within its bound, and goes with its owner."""

from __future__ import annotations

import gc
import weakref
from functools import partial

from megascale.kernels.remembered import Remembered, RememberedOf


def test_one_key_too_many_empties_it_and_a_known_one_does_not() -> None:
    known: Remembered[str, int] = Remembered(3)
    for value, key in enumerate("abcb"):
        known[key] = value
    assert dict(known) == {"a": 0, "b": 3, "c": 2}
    known["d"] = 4
    assert dict(known) == {"d": 4}
    assert known.get("a") is None


class Owner:
    """Of something; two are never equal."""


def test_each_owner_has_its_own_and_makes_it_once() -> None:
    of_owner, one, other = RememberedOf(3), Owner(), Owner()
    made: list[tuple[int, int]] = []

    def make(key: int, value: int) -> int:
        made.append((key, value))
        return value

    for key in (1, 2, 1, 2, 3):
        assert of_owner.get(one, key, partial(make, key, 10 * key)) == 10 * key
    assert made == [(1, 10), (2, 20), (3, 30)]
    assert of_owner.get(other, 1, partial(make, 1, 7)) == 7
    assert of_owner.get(one, 1, partial(make, 1, 0)) == 10
    of_owner.get(one, 4, partial(make, 4, 40))  # one too many: all of this owner are made anew
    assert of_owner.get(one, 1, partial(make, 1, 11)) == 11
    assert of_owner.get(other, 1, partial(make, 1, 0)) == 7
    assert made == [(1, 10), (2, 20), (3, 30), (1, 7), (4, 40), (1, 11)]
    assert (of_owner.count(one), of_owner.count(other)) == (2, 1)


def test_what_is_remembered_goes_with_its_owner() -> None:
    of_owner, owner = RememberedOf(3), Owner()
    value = weakref.ref(of_owner.get(owner, 1, Owner))
    assert value() is not None
    del owner
    gc.collect()
    assert value() is None
