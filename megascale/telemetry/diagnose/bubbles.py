"""How long the stages of a pipeline stand idle, against what the schedule alone makes them.

Of every pipeline (one rank a stage) in one step: the window reaches from its first compute to its
last. Idle is what a stage does not compute in it. It has two parts that multiply: the slowest
stage's own idle time, which is the schedule's bubble plus transfers that nothing hides, and what
the other stages wait for the slowest one (imbalance).

The schedule's part, as a share of computing, with p stages, v chunks each and m micro-batches:

    1f1b, gpipe           (p - 1) / m              2104.04473 section 2.2
    interleaved_1f1b      (p - 1) / (v m)          2104.04473 section 2.2
    zb_h1                 (p - 1) / (3 m)          2401.10241, forward and halves equal
    interleaved_zb        (p - 1) / (3 v m)

Exact durations give an exact bubble (`train/waterfall/bubble.py` simulates it); this layer sees no
schedule, and a formula is enough to see that half of the idle time is somebody's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DIVIDED = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 1, "zb_h1": 3, "interleaved_zb": 3}


@dataclass(frozen=True)
class Idle:
    """Medians over pipelines and steps; shares of computing time.

    idle        all stages together, over what they compute
    bubble      of the slowest stage
    imbalance   what the slowest stage computes above the mean of the stages
    busy_s_P    what each stage computes in a step
    """

    idle: float
    bubble: float
    imbalance: float
    busy_s_P: Floats

    @property
    def slowest(self) -> int:
        return int(np.argmax(self.busy_s_P))


def predicted(schedule: str, stages: int, chunks: int, micro_batches: int) -> float | None:
    """The schedule's bubble over computing time (formulas above); None: not in the table."""
    if schedule not in _DIVIDED or micro_batches < 1:
        return None
    return (stages - 1) / (_DIVIDED[schedule] * chunks * micro_batches)


def idle(
    computes: Mapping[tuple[int, int], Mapping[int, tuple[float, float, float]]],
) -> Idle | None:
    """Of pipelines whose every stage is known; None where there is none.

    computes  by (step, pipeline) and stage: when its first compute began, when its last ended, and
              how long it computed, all in seconds
    """
    stages = max((len(of) for of in computes.values()), default=0)
    whole = [of for of in computes.values() if len(of) == stages and stages > 1]
    if not whole:
        return None
    busy_KP = np.array([[of[stage][2] for stage in sorted(of)] for of in whole])
    window_K = np.array(
        [max(end for _, end, _ in of.values()) - min(b for b, _, _ in of.values()) for of in whole]
    )
    busy_P = np.median(busy_KP, axis=0)
    return Idle(
        idle=float(np.median(window_K / busy_KP.mean(axis=1) - 1)),
        bubble=float(np.median(window_K / busy_KP.max(axis=1) - 1)),
        imbalance=float(busy_P.max() / busy_P.mean() - 1),
        busy_s_P=np.asarray(busy_P),
    )
