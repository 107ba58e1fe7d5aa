"""What rank 0 says about the training, among the driver's own lines: steps, losses, resumes.

Rank 0 writes to `RUN_DIR/logs/rank00000.log`. Of a recipe its step lines and its own words are
shown, of somebody else's program whatever it writes; tracebacks and libraries' warnings stay in the
file. A second shows MOST_LINES at most. Where rank 0 is quiet for `QUIET_S`, the step is shown.
"""

from __future__ import annotations

import logging
from pathlib import Path

from megascale.cluster.driver.reading import Readings
from megascale.cluster.driver.tail import Tail

LOG = Path("logs") / "rank00000.log"
MOST_LINES = 20
MOST_BYTES = 1 << 18  # a look
LINE_CHARACTERS = 500
QUIET_S = 30.0
END_S = 1.0
NAME = LOG.name
_PREFIX = "[rank0] "
_log = logging.getLogger(__name__)


class FirstRank:
    """`look` once a second, `end` at the end. What an earlier job or driver left in the file is
    passed over."""

    def __init__(self, run_dir: Path, readings: Readings, *, is_recipe: bool) -> None:
        self._readings, self._is_recipe = readings, is_recipe
        self._tail = Tail(run_dir / LOG, MOST_BYTES)
        self._tail.skip()
        self._shown_s: float | None = None
        self._shown_step: int | None = None

    def look(self, now_s: float, step: int | None) -> None:
        """step: the newest that all ranks finished."""
        if self._shown_s is None:
            self._shown_s = now_s
        if self._show(self._readings.poll(NAME, None, self._tail.lines) or []):
            self._shown_s = now_s
        elif step is not None and step != self._shown_step and now_s - self._shown_s >= QUIET_S:
            _log.info("step: %d", step)
            self._shown_s, self._shown_step = now_s, step

    def end(self) -> None:
        """The last lines, where they can be read in END_S."""
        self._show(self._readings.take(NAME, None, END_S) or [])  # was asked for before
        self._readings.ask(NAME, None, self._tail.lines)
        self._show(self._readings.take(NAME, None, END_S) or [])

    def _show(self, read: list[bytes]) -> bool:
        """True where there was something to show."""
        texts = [line.decode(errors="replace").rstrip() for line in read]
        lines = [shown for text in texts if (shown := self._wanted(text))]
        for line in lines[:MOST_LINES]:
            _log.info("%s", line[:LINE_CHARACTERS])
        if len(lines) > MOST_LINES:
            more = len(lines) - MOST_LINES
            _log.info("%d lines more of rank 0 are in %s", more, self._tail.path)
        return bool(lines)

    def _wanted(self, line: str) -> str:
        """The line as it is shown, or ""."""
        if line.startswith("[agent] ") or not line:
            return ""
        if not self._is_recipe or line.startswith("step: "):
            return line
        return line.removeprefix(_PREFIX) if line.startswith(_PREFIX) else ""
