"""A step's time by class: what was computed, what each axis of parallelism made ranks wait for.

From the sums of every step, so always there; it knows classes of spans, not operators. The full
waterfall, which also splits computing into matrix products at the device's peak, what they take
above it, attention and element-wise work, needs marked operators (`telemetry.waterfall`) and is
`train/waterfall/account.py`, `megascale bench step RECIPE --waterfall`.

Classes add up to the step: `other` is what no class claims.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.diagnose.straggler import COMPUTES, WAITS

Floats = NDArray[np.float64]

CLASSES = ("compute", "tp", "pp", "dp", "world", "optimizer", "host", "other")
MEANING: Mapping[str, str] = {
    "compute": "forward and backward without waits",
    "tp": "inside tensor-parallel operators",
    "pp": "waiting for neighbours in the pipeline",
    "dp": "waiting for gradients and parameters",
    "world": "waiting for the sum over all ranks",
    "optimizer": "norm and update",
    "host": "data, garbage collection, checkpoint, validation",
    "other": "no span claims it",
}
OF_CLASS: Mapping[str, tuple[str, ...]] = {
    "tp": tuple(name for name in WAITS if name != "param_gather"),
    "pp": ("pp_wait", "pp_finish", "send", "recv", "head_input", "head_gradient"),
    "dp": ("grad_sync", "param_gather"),
    "world": ("world_sums",),
    "optimizer": ("optimizer", "grad_norm"),
    "host": ("data_wait", "gc", "checkpoint", "validation"),
}


def classes(phases: Mapping[str, Floats], step: Floats) -> dict[str, Floats]:
    """By class, in the unit of its arguments and their shape.

    phases  time in each phase; NaN where a rank has none
    step    time of the whole step
    """
    nothing = np.zeros_like(step)

    def sum_of(names: tuple[str, ...]) -> Floats:
        found = nothing.copy()
        for name in names:
            if name in phases:
                found = found + np.nan_to_num(phases[name])
        return found

    of = {"compute": np.maximum(0.0, sum_of(COMPUTES) - sum_of(WAITS))}
    of |= {name: sum_of(members) for name, members in OF_CLASS.items()}
    of["other"] = np.maximum(0.0, step - sum(of.values(), start=nothing))
    return {name: of[name] for name in CLASSES}
