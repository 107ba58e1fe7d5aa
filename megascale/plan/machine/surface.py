"""Between samples: a correction that is exact at them and nowhere steep; a line that only rises.

A measured kernel differs from the parametric curve by a factor that varies slowly with the sizes.
`Surface` holds the logarithm of that factor at the samples and, anywhere else, takes the middle of
the lowest and the highest value that a function can have there which goes through all samples with
slope at most `slope` in each coordinate (the best guess in the worst case; McShane's extension).
That middle has slope at most `slope` too. Since the curve's own logarithm rises faster, the
product of both still grows with every size, however noisy the samples are; a smoother of higher
order gives no such bound. Samples closer than noise are not passed through but halved between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import exp, log

import numpy as np


class Surface:
    """`factor(x)` of coordinates x, from samples of it."""

    def __init__(
        self, places: Sequence[Sequence[float]], factors: Sequence[float], slope: float
    ) -> None:
        assert len(places) == len(factors) > 0, (len(places), len(factors))
        self._places = np.asarray(places, dtype=float)
        self._logs = np.log(np.asarray(factors, dtype=float))
        self._slope = slope
        self._bounds = float(self._logs.min()), float(self._logs.max())

    def factor(self, place: Sequence[float]) -> float:
        """Between samples by slope, far from all of them within their range."""
        away = self._slope * np.abs(self._places - np.asarray(place)).sum(axis=1)
        middle = ((self._logs - away).max() + (self._logs + away).min()) / 2
        low, high = self._bounds
        return exp(min(high, max(low, float(middle))))


class Line:
    """Seconds of a size: straight between samples in logarithms, never falling."""

    def __init__(self, samples: Iterable[tuple[float, float]], at_zero_s: float) -> None:
        """samples: (size, seconds), of which equal sizes count by their mean."""
        by_size: dict[float, list[float]] = {}
        for size, seconds in samples:
            by_size.setdefault(size, []).append(seconds)
        assert by_size, "a line has at least one sample"
        self._sizes = sorted(by_size)
        means = [sum(by_size[size]) / len(by_size[size]) for size in self._sizes]
        self._seconds = [float(value) for value in np.maximum.accumulate(means)]
        self._at_zero_s = min(at_zero_s, self._seconds[0])

    def seconds(self, size: float) -> float:
        """Below the samples straight to `at_zero_s`; above them at the last one's rate."""
        sizes, seconds = self._sizes, self._seconds
        if size <= sizes[0]:
            return self._at_zero_s + (seconds[0] - self._at_zero_s) * size / sizes[0]
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        right = bisect_right(sizes, size)
        left = right - 1
        part = log(size / sizes[left]) / log(sizes[right] / sizes[left])
        return seconds[left] * (seconds[right] / seconds[left]) ** part
