"""The driver's journal, read while it is written: each transition with the job before and after it.

Rows are events; `decide` is pure, so the state after each is had by the same function that the
driver used. Times are the machine's monotonic clock, which driver, trainers and chaos share.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megascale.cluster.decide import decide
from megascale.cluster.job import JobState
from megascale.cluster.transitions import Event

_STATE = TypeAdapter(JobState)
_EVENTS: dict[str, TypeAdapter[Any]] = {cls.__name__: TypeAdapter(cls) for cls in Event.__args__}


@dataclass(frozen=True)
class Turn:
    """One transition. event: the class's name; `body` its fields; at_s: monotonic, unix_s: wall."""

    at_s: float
    unix_s: float
    event: str
    body: dict[str, Any]
    actions: tuple[dict[str, Any], ...]
    reason: str
    before: JobState
    job: JobState

    def did(self, *names: str) -> list[dict[str, Any]]:
        """Its actions of these classes."""
        return [action for action in self.actions if action["do"] in names]


@dataclass
class Journal:
    """`turns` grows with each `read`; nothing while there is no file yet."""

    path: Path
    turns: list[Turn] = field(default_factory=list)
    began_unix_s: float | None = None
    _last_id: int = 0
    _job: JobState | None = None

    @property
    def job(self) -> JobState | None:
        """After the last transition that was read."""
        return self._job

    def read(self) -> list[Turn]:
        """What is new."""
        seen = len(self.turns)
        with suppress(sqlite3.OperationalError):
            for row in self._rows():
                self._take(row)
        return self.turns[seen:]

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        if not self.path.exists():
            return
        db = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=5.0)
        try:
            yield from db.execute(
                "SELECT id, kind, json, job_s, unix_s, monotonic_s FROM transitions WHERE id > ? "
                "ORDER BY id",
                (self._last_id,),
            )
        finally:
            db.close()

    def _take(self, row: tuple[Any, ...]) -> None:
        number, kind, text, job_s, unix_s, monotonic_s = row
        self._last_id = number
        if self.began_unix_s is None:
            self.began_unix_s = unix_s
        if kind == "state":
            self._job = _STATE.validate_json(text)
            return
        entry = json.loads(text)
        before = self._job
        assert before is not None, "a journal begins with a state"
        self._job = decide(before, _EVENTS[kind].validate_python(entry["event"]), job_s).job
        self.turns.append(
            Turn(
                monotonic_s,
                unix_s,
                kind,
                entry["event"],
                tuple(entry["actions"]),
                entry["reason"],
                before,
                self._job,
            )
        )
