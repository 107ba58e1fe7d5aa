"""The losses that the writer rank leaves in `metrics.jsonl`, read while the file grows."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path

HISTORY = 60
MOST_BYTES = 1 << 20  # a second's worth by far


class Losses:
    """`new` gives each step that came since, with the losses up to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def skip(self) -> None:
        """What is in the file now is of an epoch before."""
        self._losses.clear()
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> Iterator[tuple[int, list[float]]]:
        for line in self._lines():
            try:
                record = json.loads(line)
                step, loss = int(record["step"]), float(record["loss"])
            except (ValueError, KeyError, TypeError):
                continue  # of a validation, or cut by a kill
            self._losses.append(loss if math.isfinite(loss) else math.inf)
            yield step, list(self._losses)

    def _lines(self) -> list[bytes]:
        """Whole lines that were not read yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MOST_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()
