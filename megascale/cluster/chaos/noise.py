"""Compute times of healthy ranks, seeded, by the noise model of `noise.json`.

The paced trainers of a schedule sleep by it, and the detectors' false alarms are counted by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MODEL: Mapping[str, float] = {
    key: value
    for key, value in json.loads((Path(__file__).parent / "noise.json").read_text()).items()
    if key != "meaning"
}

PACED_STEPS = 4096


class Noise:
    """A job whose stages take `stage_s[stage]` a step, forward and backward together.

    slow  relative slowness of single ranks, from the first step on
    """

    def __init__(
        self,
        stage_R: NDArray[np.int64],
        *,
        seed: int,
        stage_s: float | NDArray[np.float64] = 1.0,
        slow: Mapping[int, float] | None = None,
        model: Mapping[str, float] = MODEL,
    ) -> None:
        self.rng, self.model = np.random.default_rng(seed), model
        num_ranks = len(stage_R)
        self.base_R = np.broadcast_to(stage_s, int(stage_R.max()) + 1)[stage_R].astype(float)
        self.chip_R = self.rng.normal(0, model["chip_sd"], num_ranks)
        self.slow_R = np.ones(num_ranks)
        for rank, share in (slow or {}).items():
            self.slow_R[rank] += share
        self.host_R = np.arange(num_ranks) // int(model["ranks_per_host"])
        self.host_H = self._host_part(1.0)

    def steps(self, num_steps: int) -> NDArray[np.float64]:
        """Seconds of compute, (num_steps, num_ranks); goes on where the last call ended."""
        return np.stack(list(self._steps(num_steps)))

    def _steps(self, num_steps: int) -> Iterator[NDArray[np.float64]]:
        model, num_ranks = self.model, len(self.base_R)
        memory = model["host_memory"]
        own_sd = model["step_sd"] * np.sqrt(1 - model["host_share"])
        for _ in range(num_steps):
            self.host_H = memory * self.host_H + self._host_part(np.sqrt(1 - memory**2))
            own_R = self.rng.normal(0, own_sd, num_ranks)
            paused_R = self.rng.random(num_ranks) < model["pause_chance"]
            pause_R = paused_R * self.rng.exponential(model["pause_mean"], num_ranks)
            time_R = (
                self.base_R * self.slow_R * (1 + self.chip_R + self.host_H[self.host_R] + own_R)
            )
            yield (time_R + pause_R * self.base_R) * (1 + self.rng.normal(0, model["job_sd"]))

    def _host_part(self, scale: float) -> NDArray[np.float64]:
        sd = self.model["step_sd"] * np.sqrt(self.model["host_share"])
        return self.rng.normal(0, sd * scale, int(self.host_R[-1]) + 1)


def paces(hosts: int, ranks_per_host: int, step_s: float, seed: int) -> list[list[float]]:
    """Seconds of compute of PACED_STEPS steps, `[step][rank]`, for `train/pace.py`."""
    model = {**MODEL, "ranks_per_host": ranks_per_host}
    noise = Noise(
        np.zeros(hosts * ranks_per_host, np.int64), seed=seed, stage_s=step_s, model=model
    )
    return [[round(s, 6) for s in row] for row in noise.steps(PACED_STEPS).tolist()]
