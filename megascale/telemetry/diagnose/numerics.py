"""Numbers that went wrong: gradients that are not finite, and a loss that jumps (ByteRobust 4)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.telemetry.diagnose.finding import Finding

HISTORY = 50  # losses before, of which at least LEAST are needed
LEAST = 10
DEVIATIONS = 8.0  # robust ones
SMALLEST = 0.01  # of the median: the least that counts as one deviation
CONFIRM = 3  # losses in a row: no longer a single bad batch


def nonfinite(
    noticed: Mapping[int, Sequence[tuple[int, Mapping[str, Any]]]], world_size: int
) -> Finding | None:
    """The newest step in which ranks noticed a gradient that is not finite.

    noticed  (step, detail) of each rank's incidents "nonfinite", in order; detail names the
             parameter

    The trainer agrees on it over the world, so usually all ranks say the same and nobody stands
    out: `ranks` is empty, the parameter is in the evidence, and a replay finds the machine.
    """
    last = max((events[-1][0] for events in noticed.values() if events), default=None)
    if last is None:
        return None
    said = {
        rank: detail.get("parameter")
        for rank, events in noticed.items()
        for step, detail in events
        if step == last
    }
    in_a_row = _steps_in_a_row({step for events in noticed.values() for step, _ in events}, last)
    return Finding(
        kind="nonfinite",
        ranks=() if len(said) == world_size else tuple(sorted(said)),
        evidence={
            "parameters": dict(Counter(str(name) for name in said.values())),
            "steps_in_a_row": in_a_row,
            "num_ranks": len(said),
        },
        step=last,
    )


def loss_spike(losses: Sequence[float], step: int) -> Finding | None:
    """Does the newest loss jump out of the HISTORY before it? The last CONFIRM are no part of that
    history: they may have jumped too. An alert; certain where all of them did, or at a loss that is
    not finite. `agreed_step` of the evidence is the last step before the jump.

    losses  of steps in order, the last of `step`
    """
    if len(losses) < LEAST + CONFIRM:
        return None
    middle, deviation = _usual(losses[:-CONFIRM])
    number = 0
    for loss in reversed(losses[-CONFIRM:]):
        if math.isfinite(loss) and loss <= middle + DEVIATIONS * deviation:
            break
        number += 1
    if not number:
        return None
    return Finding(
        kind="loss_spike",
        ranks=(),
        evidence={
            "loss": losses[-1] if math.isfinite(losses[-1]) else str(losses[-1]),
            "median": middle,
            "deviation": deviation,
            "in_a_row": number,
            "agreed_step": step - number,
        },
        step=step,
        group="world",
        certain=number >= CONFIRM or not math.isfinite(losses[-1]),
    )


@dataclass(frozen=True)
class Spike:
    """Steps in a row whose loss is out of what came before."""

    first_step: int
    last_step: int
    peak: float
    usual: float


def loss_spikes(
    steps: Sequence[int], losses: Sequence[float], *, smallest: float = SMALLEST
) -> list[Spike]:
    """Every spike of a whole run: values, in order, above the median of the LEAST good ones before
    by DEVIATIONS. How far values scatter is measured from one good one to the next over HISTORY,
    so a loss that falls fast is no scatter. A spike that lasts longer than HISTORY is what is usual
    from then on.

    smallest  of the median: the least that counts as one deviation
    """
    found: list[Spike] = []
    good: deque[float] = deque(maxlen=HISTORY)
    going_on = False
    middle, limit = 0.0, 0.0
    for step, loss in zip(steps, losses, strict=True):
        judged = len(good) >= LEAST and (going_on or not loss <= max([*good][-LEAST:]))
        if judged and not going_on:
            middle, limit = _expected([*good], smallest)
        going_on, continues = judged and not loss <= limit, going_on
        if going_on and continues:
            last = found[-1]
            found[-1] = Spike(last.first_step, step, max(last.peak, loss), last.usual)
        elif going_on:
            found.append(Spike(step, step, loss, middle))
        lasts = going_on and found[-1].last_step - found[-1].first_step >= HISTORY
        if math.isfinite(loss) and (lasts or not going_on):
            good.append(loss)
            if lasts:
                middle, limit = _expected([*good], smallest)
    return found


def _expected(good: Sequence[float], smallest: float) -> tuple[float, float]:
    """Median of the newest LEAST, and above which value the next one is out."""
    middle = float(np.median(good[-LEAST:]))
    changes = np.abs(np.diff(good))
    scatter = 1.4826 * float(np.median(changes)) / math.sqrt(2)
    return middle, middle + DEVIATIONS * max(scatter, smallest * abs(middle))


def _usual(before: Sequence[float]) -> tuple[float, float]:
    """Median and robust deviation of the finite ones among the last HISTORY."""
    values = np.array([x for x in before[-HISTORY:] if math.isfinite(x)])
    if not len(values):
        return math.inf, 0.0
    middle = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - middle)))
    return middle, max(deviation, SMALLEST * abs(middle))


def _steps_in_a_row(steps: set[int], last: int) -> int:
    first = last
    while first - 1 in steps:
        first -= 1
    return last - first + 1
