"""A figure of a simulation: its value and the range that nine of ten draws fall into."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError


@dataclass(frozen=True)
class Interval:
    """`value` is the mean; from `low` to `high` lie the 5th to the 95th percentile of the draws."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval_of(draws: NDArray[np.float64]) -> Interval:
    """Mean and 5th to 95th percentile of `draws`."""
    low, high = np.percentile(draws, (5.0, 95.0))
    return Interval(float(draws.mean()), float(low), float(high))


def check_number(
    name: str, value: float, *, least: float, most: float = math.inf, above: bool = False
) -> None:
    """Raise ConfigError where `value` is not a finite number from `least` to `most`.

    above  `least` itself is not legal
    """
    inside = least < value <= most if above else least <= value <= most
    if math.isfinite(value) and inside:
        return
    words = f"more than {least:g}" if above else f"{least:g} or more"
    if most != math.inf:
        words += f", at most {most:g}"
    raise ConfigError(f"{name} is {value:g}; legal is {words}")


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Raise ConfigError where `value` is not a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}; legal is a whole number, {least} or more")
