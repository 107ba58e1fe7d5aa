"""What follows a step whose gradient is not finite (`training.nonfinite_policy`).

Its update was masked on the device already. The verdict is of values that are equal on all ranks,
so all ranks take the same one.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch.distributed as dist

from megascale.checkpoint.agree import enclosed
from megascale.config import TrainingConfig
from megascale.errors import NumericalError

logger = logging.getLogger(__name__)


class NonfiniteSteps:
    """Counts such steps in a row, over rollbacks: replayed good steps end no row."""

    def __init__(self, training: TrainingConfig) -> None:
        self._policy, self._most = training.nonfinite_policy, training.max_nonfinite_steps
        self._num_in_row = 0
        self._last_step = 0

    def passed(self, step: int) -> None:
        """`step` was finite."""
        if step > self._last_step:  # replayed steps prove nothing
            self._num_in_row = 0

    def verdict(self, step: int, parameter: str | None) -> Literal["skip", "rollback"]:
        """Of `step`, whose gradient of `parameter` is not finite. Raises NumericalError to stop."""
        self._num_in_row += 1
        self._last_step = max(self._last_step, step)
        what = f"step {step}: the gradient of {parameter} is not finite; it was not applied"
        if self._policy == "stop":
            raise NumericalError(f"{what}. Stopped (training.nonfinite_policy = 'stop')")
        if self._num_in_row >= self._most:
            raise NumericalError(
                f"{what}. Stopped after {self._num_in_row} such steps in a row "
                "(training.max_nonfinite_steps)"
            )
        if self._policy == "skip":
            logger.warning("%s (training.nonfinite_policy = 'skip')", what)
        else:
            logger.warning("%s; rolling back, and going on with the data behind it", what)
        return self._policy


def first_bad_name(own: str | None, world_size: int) -> str | None:
    """The first rank's answer that is one. Collective over all ranks, of the same step."""
    if world_size == 1:
        return own
    names: list[str | None] = [None] * world_size
    with enclosed():
        dist.all_gather_object(names, own)
    return next((name for name in names if name is not None), None)
