"""Median and deviation that a few wild values do not move, where values may be missing (NaN)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAD_TO_SIGMA = 1.4826  # of a normal distribution


def median(values: Floats, axis: int) -> Floats:
    """Median along `axis`, which stays, with length 1; NaN where nothing is known."""
    if not np.isnan(values).any():
        return np.median(values, axis=axis, keepdims=True)
    empty = np.isnan(values).all(axis=axis, keepdims=True)
    found = np.nanmedian(np.where(empty, 0.0, values), axis=axis, keepdims=True)
    return np.where(empty, np.nan, found)


def deviation(values: Floats, axis: int) -> Floats:
    """Standard deviation along `axis`, of a normal distribution, by the median distance from the
    median; shaped as `median`."""
    return MAD_TO_SIGMA * median(np.abs(values - median(values, axis)), axis)
