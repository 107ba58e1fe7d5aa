"""What restarts cost: steps done again, time in between, and whether the loss went on (MegaScale
Figure 11). Pure.

A restart goes back to a checkpoint, so steps behind it are done again. With data that depend on the
step alone their losses repeat; a loss that is another one after the restart says that the state or
the data are not what they were.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LOSS_DIFFERS = 0.02  # of the loss: more than a change of the layout makes


@dataclass(frozen=True)
class Started:
    """One start: its steps (None where it finished none), when its header was written, when its
    last step ended, and the seconds of each step, where they are known."""

    number: int
    steps: tuple[int, int] | None
    begin_s: float
    end_s: float
    first_step_end_s: float
    step_s: float


@dataclass(frozen=True)
class Restarted:
    """What the start `number` cost.

    replayed    first and last of the steps that were done again; None: none
    down_s      from the last step before to the end of the first one after
    replay_s    of steps that were done again
    loss_change the largest relative change of the loss of a step that was done again; None: unknown
    """

    number: int
    at_step: int
    replayed: tuple[int, int] | None
    down_s: float
    replay_s: float
    loss_change: float | None

    @property
    def lost_s(self) -> float:
        return self.down_s + self.replay_s


def restarts(starts: Sequence[Started], losses: Sequence[Mapping[int, float]]) -> list[Restarted]:
    """losses: by start, the loss of each step that it logged."""
    found = []
    before: Started | None = None
    reached = 0
    for start in starts:
        if start.steps is None:
            continue
        first, last = start.steps
        if before is not None:
            again = (first, min(last, reached)) if first <= reached else None
            replay_s = (again[1] - again[0] + 1) * start.step_s if again else 0.0
            down_s = max(0.0, start.first_step_end_s - before.end_s - start.step_s)
            change = _loss_change(losses, start.number, again)
            found.append(Restarted(start.number, reached, again, down_s, replay_s, change))
        reached = max(reached, last) if before is None else last
        before = start
    return found


def _loss_change(
    losses: Sequence[Mapping[int, float]], number: int, again: tuple[int, int] | None
) -> float | None:
    if again is None:
        return None
    changes = []
    for step in range(again[0], again[1] + 1):
        own = losses[number].get(step)
        earlier = next((of[step] for of in reversed(losses[:number]) if step in of), None)
        if own is not None and earlier:
            changes.append(abs(own / earlier - 1))
    return max(changes, default=None)


def median_or_none(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
