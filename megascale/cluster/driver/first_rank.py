"""What rank 0 says about the training, among the driver's own lines: steps, losses, resumes.

Rank 0 writes to `RUN_DIR/logs/rank00000.log`. Of a recipe its step lines and its own words are
shown, of somebody else's program whatever it writes; tracebacks and libraries' warnings stay in the
file. A second shows MOST_LINES at most. Where rank 0 is quiet for `QUIET_S`, the step is shown.
"""

from __future__ import annotations

import logging
from pathlib import Path

LOG = Path("logs") / "rank00000.log"
MOST_LINES = 20
MOST_BYTES = 1 << 18  # a look
LINE_CHARACTERS = 500
QUIET_S = 30.0
_PREFIX = "[rank0] "
_log = logging.getLogger(__name__)


class FirstRank:
    """`look` once a second. What an earlier job or driver left in the file is passed over."""

    def __init__(self, run_dir: Path, *, is_recipe: bool) -> None:
        self._path, self._is_recipe = run_dir / LOG, is_recipe
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        self._shown_s: float | None = None
        self._shown_step: int | None = None

    def look(self, now_s: float, step: int | None) -> None:
        """step: the newest that all ranks finished."""
        if self._shown_s is None:
            self._shown_s = now_s
        lines = [shown for line in self._new() if (shown := self._wanted(line))]
        for line in lines[:MOST_LINES]:
            _log.info("%s", line[:LINE_CHARACTERS])
        if len(lines) > MOST_LINES:
            _log.info("%d lines more of rank 0 are in %s", len(lines) - MOST_LINES, self._path)
        if lines:
            self._shown_s = now_s
        elif step is not None and step != self._shown_step and now_s - self._shown_s >= QUIET_S:
            _log.info("step: %d", step)
            self._shown_s, self._shown_step = now_s, step

    def _wanted(self, line: str) -> str:
        """The line as it is shown, or ""."""
        if line.startswith("[agent] ") or not line:
            return ""
        if not self._is_recipe or line.startswith("step: "):
            return line
        return line.removeprefix(_PREFIX) if line.startswith(_PREFIX) else ""

    def _new(self) -> list[str]:
        """Whole lines that were not read yet; of a flood the newest."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if not 0 <= size - self._offset <= MOST_BYTES:
                    self._offset = max(0, size - MOST_BYTES)
                file.seek(self._offset)
                data = file.read(MOST_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line.rstrip() for line in whole.decode(errors="replace").splitlines()]
