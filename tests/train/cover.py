"""A pairwise cover: a short list of cases in which every feasible pair of values occurs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    feasible: Callable[[Case], bool],
    *,
    first: Sequence[Case] = (),
    seed: int = 0,
) -> list[Case]:
    """Greedy cover, deterministic under `seed`; begins with the cases `first`."""
    rng = random.Random(seed)

    def draw() -> Case:
        while True:
            case = {name: rng.choice(list(values)) for name, values in factors.items()}
            if feasible(case):
                return case

    pool = [draw() for _ in range(4000)]
    pairs = [_pairs(case) for case in pool]
    missing = set().union(*pairs)
    cover = list(first)
    for case in cover:
        assert feasible(case), case
        missing -= _pairs(case)
    while missing:
        best = max(range(len(pool)), key=lambda i: len(missing & pairs[i]))
        cover.append(pool[best])
        missing -= pairs[best]
    return cover


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(sorted(case.items()), 2))
