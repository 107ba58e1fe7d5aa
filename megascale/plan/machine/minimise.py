"""The least of a function of few bounded numbers, without derivatives: a compass search.

Each number in turn is tried a step up and a step down; where nothing helps, all steps shrink. Slow
where numbers depend on each other strongly, but it has no randomness: the same samples give the
same file. The curves fitted with it have two to seven numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Numbers = dict[str, float]


def minimise(
    loss: Callable[[Numbers], float],
    start: Numbers,
    bounds: Mapping[str, tuple[float, float]],
    *,
    rounds: int = 60,
    first_step: float = 0.2,
) -> Numbers:
    """Numbers within `bounds` near to the least `loss`; `first_step` is a share of each range."""
    best = {name: min(high, max(low, start[name])) for name, (low, high) in bounds.items()}
    least, step = loss(best), first_step
    for _ in range(rounds):
        improved = False
        for name, (low, high) in bounds.items():
            for way in (step, -step):
                value = min(high, max(low, best[name] + way * (high - low)))
                if value == best[name]:
                    continue
                tried = {**best, name: value}
                found = loss(tried)
                if found < least:
                    best, least, improved = tried, found, True
                    break
        if not improved:
            step /= 2
            if step < 1e-4:
                break
    return best
