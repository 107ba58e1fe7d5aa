"""What is made once for a key and used in every later call, within a bound.

A fused call has tens of microseconds of host time, so launches, plans and answers are made once a
problem. A server sees any number of problems (every length of a prompt is one), so each such
dictionary has a bound. One more and all are forgotten: the next calls make theirs anew, as the
first ones did. That is cheaper than an order of use, which every call would have to note, and a
program that goes round among one problem too many makes each once a round.

Invariant: what is forgotten may still be in use, by a kernel that runs or in a graph that is
replayed. So a value must not own device memory that these read or write; its owner (an arena) does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import finalize

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Remembered(dict[_K, _V]):
    """A dictionary of at most `most` keys, emptied when one more comes.

    `get` is that of dict and costs what it costs there. Values come in by `known[key] = value`.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)


class RememberedOf:
    """A `Remembered` for each owner (a slot, an arena), which goes with it.

    Values must not refer to their owner, or it would never go; to its memory they may.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # by id: half the time of a WeakKeyDictionary, which is Python
        self._known: dict[int, Remembered[Hashable, Any]] = {}

    def get(self, owner: Any, key: Hashable, make: Callable[[], _V]) -> _V:
        """What `make` gave for this owner and key; the key says all that it depends on."""
        known = self._known.get(id(owner))
        if known is None:
            known = self._known[id(owner)] = Remembered(self.most)
            finalize(owner, self._known.pop, id(owner)).atexit = False
        found: _V | None = known.get(key)
        if found is None:
            found = known[key] = make()
        return found

    def count(self, owner: Any) -> int:
        """Keys of this owner."""
        return len(self._known.get(id(owner), ()))
