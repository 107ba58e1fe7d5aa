"""The losses that the writer rank leaves in `metrics.jsonl`, read while the file grows."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megascale.cluster.driver.reading import Readings
from megascale.cluster.driver.tail import Tail

HISTORY = 60
MOST_BYTES = 1 << 20  # a second's worth by far


class Losses:
    """`new` gives each step that came since, with the losses up to it."""

    def __init__(self, path: Path, readings: Readings) -> None:
        self._readings, self._tail = readings, Tail(path, MOST_BYTES)
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._epoch: int | None = None
        self._tail_epoch: int | None = None

    def begin(self, epoch: int | None) -> None:
        """What is in the file now is of an epoch before."""
        self._losses.clear()
        self._epoch = epoch
        self._poll()

    def new(self) -> Iterator[tuple[int, list[float]]]:
        for line in self._poll():
            try:
                record = json.loads(line)
                step, loss = int(record["step"]), float(record["loss"])
            except (ValueError, KeyError, TypeError):
                continue  # of a validation, or cut by a kill
            self._losses.append(loss if math.isfinite(loss) else math.inf)
            yield step, list(self._losses)

    def _poll(self) -> list[bytes]:
        read = partial(self._read, self._epoch)
        return self._readings.poll("metrics.jsonl", self._epoch, read) or []

    def _read(self, epoch: int | None) -> list[bytes]:
        """Beside the thread that decides, which leaves `_tail` alone."""
        if epoch != self._tail_epoch:
            try:
                self._tail.skip()
            except OSError:
                return []
            self._tail_epoch = epoch
        return self._tail.lines()
