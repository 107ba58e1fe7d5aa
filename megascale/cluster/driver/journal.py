"""Every transition of a job in SQLite: what the next driver rebuilds the job from.

A row is an event with the actions it led to (kind = the event's class), or a whole state
(kind = "state"), written at the start, at each new epoch and every `STATE_EVERY` rows. A job is the
newest state and the events after it, through `decide`, which is pure.

A damaged file is set aside. What can be read of it goes into a new one, up to the first row that
does not read; that rows were lost is said once, in `lost`. A file that cannot be written, because
the disk is full or somebody holds it, is no damaged one: it stays as it is.

Durability: WAL with synchronous=FULL. A transition is on the disk before its actions are carried
out; a batch of events is one transaction.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megascale.cluster import transitions
from megascale.cluster.actions import Action
from megascale.cluster.decide import Decision, decide
from megascale.cluster.job import JobState
from megascale.cluster.transitions import Event
from megascale.errors import LaunchError

STATE_EVERY = 500
SCHEMA = """
CREATE TABLE IF NOT EXISTS transitions (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, json TEXT NOT NULL, epoch INTEGER NOT NULL,
    job_s REAL NOT NULL, unix_s REAL NOT NULL, monotonic_s REAL NOT NULL)
"""
_log = logging.getLogger(__name__)
_STATE = TypeAdapter(JobState)
_ACTIONS: TypeAdapter[tuple[Action, ...]] = TypeAdapter(tuple[Action, ...])
_EVENTS: dict[str, TypeAdapter[Any]] = {cls.__name__: TypeAdapter(cls) for cls in Event.__args__}
Row = tuple[str, str, int, float, float, float]
# What SQLite calls a damaged file; the last: one that is shorter than it says.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR_SHORT_READ)


class Journal:
    """Of one run folder. `restore` first, `append` after; for one thread. Raises LaunchError where
    the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._open_or_salvage()
        except sqlite3.DatabaseError as error:
            raise self._unusable(error) from None
        self._since_state = 0

    def restore(self) -> tuple[JobState, float] | None:
        """The job and the job's time of its last transition; None where there is none.

        Raises LaunchError for a journal of another version.
        """
        try:
            return self._restored()
        except (sqlite3.DatabaseError, json.JSONDecodeError) as error:  # a row that is no text
            self._db.close()
            self._db = self._salvage(str(error)[:200])
            return self._restored()

    def _restored(self) -> tuple[JobState, float] | None:
        newest = self._db.execute(
            "SELECT id, json, job_s FROM transitions WHERE kind = 'state' ORDER BY id DESC LIMIT 1"
        ).fetchone()
        if newest is None:
            return None
        try:
            json.loads(newest[1])  # what is no JSON is damage, what is no state another version
            job, job_s = _STATE.validate_json(newest[1]), float(newest[2])
            rows = self._db.execute(
                "SELECT kind, json, job_s FROM transitions WHERE id > ? ORDER BY id", (newest[0],)
            )
            for kind, text, job_s in rows:
                event = _EVENTS[kind].validate_python(json.loads(text)["event"])
                job = decide(job, event, job_s).job
        except json.JSONDecodeError:
            raise
        except (ValidationError, KeyError, ValueError) as error:
            raise LaunchError(
                f"{self.path} is no journal of this version ({error}); resume the run with the "
                "version that wrote it, or move the file away and start with --resume"
            ) from None
        return job, job_s

    @property
    def last_unix_s(self) -> float | None:
        """Wall time of the last row."""
        row = self._db.execute("SELECT unix_s FROM transitions ORDER BY id DESC LIMIT 1").fetchone()
        return None if row is None else float(row[0])

    def begin(self, decision: Decision, job_s: float) -> None:
        """The first row of a job, or of a driver."""
        self._write([self._state_row(decision.job, job_s)])

    def append(self, decided: Sequence[tuple[Event, Decision, float]]) -> None:
        """One transaction: on the disk when this returns. Raises LaunchError where it cannot be."""
        rows: list[Row] = []
        for event, decision, job_s in decided:
            text = json.dumps(
                {
                    "event": _EVENTS[type(event).__name__].dump_python(event, mode="json"),
                    "actions": [
                        {"do": type(action).__name__, **fields}
                        for action, fields in zip(
                            decision.actions,
                            _ACTIONS.dump_python(decision.actions, mode="json"),
                            strict=True,
                        )
                    ],
                    "reason": decision.reason,
                }
            )
            rows.append(self._row(type(event).__name__, text, decision.job.epoch, job_s))
        self._since_state += len(rows)
        starts = any(
            type(action).__name__ == "StartEpoch"
            for _, decision, _ in decided
            for action in decision.actions
        )
        ended = decided[-1][1].job.over
        if rows and not ended and (starts or self._since_state >= STATE_EVERY):
            rows.append(self._state_row(decided[-1][1].job, decided[-1][2]))
        self._write(rows)

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------ inside

    def _state_row(self, job: JobState, job_s: float) -> Row:
        self._since_state = 0
        return self._row("state", _STATE.dump_json(job).decode(), job.epoch, job_s)

    def _row(self, kind: str, text: str, epoch: int, job_s: float) -> Row:
        return kind, text, epoch, job_s, time.time(), time.monotonic()

    def _write(self, rows: Sequence[Row]) -> None:
        try:
            with self._db:
                self._db.executemany(
                    "INSERT INTO transitions (kind, json, epoch, job_s, unix_s, monotonic_s) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    rows,
                )
        except sqlite3.DatabaseError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: sqlite3.DatabaseError) -> LaunchError:
        return LaunchError(
            f"{self.path} cannot be used ({error}); make room on its disk, see who holds the file, "
            "and start again with the same command: ranks that run go on meanwhile"
        )

    def _open_or_salvage(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            return self._salvage(str(error))

    def _open(self) -> sqlite3.Connection:
        """Raises sqlite3.DatabaseError for a file that is not whole."""
        db = sqlite3.connect(self.path, timeout=10.0, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute(SCHEMA)
            db.commit()
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                damage = sqlite3.DatabaseError(found)
                damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise damage
        except sqlite3.DatabaseError:
            db.close()
            raise
        return db

    def _salvage(self, why: str) -> sqlite3.Connection:
        """Set the damaged file aside and begin a new one with the rows that can be read."""
        rows = _readable_rows(self.path)
        number = 1 + len(list(self.path.parent.glob(f"{self.path.name}.damaged-*")))
        aside = self.path.with_name(f"{self.path.name}.damaged-{number}")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.lost = (
            f"{self.path} was damaged ({why}): {len(rows)} transitions were read, what came after "
            f"them is lost; the file is kept as {aside.name}"
        )
        _log.warning("%s", self.lost)
        db = self._open()
        with db:
            db.executemany("INSERT INTO transitions VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        return db


def is_unfinished(path: Path) -> bool:
    """Whether the job in the journal at `path` has not ended; a look that changes nothing."""
    if not path.exists():
        return False
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0)
        try:
            row = db.execute("SELECT json FROM transitions ORDER BY id DESC LIMIT 1").fetchone()
        finally:
            db.close()
    except sqlite3.DatabaseError:
        return True  # damaged: the driver mends it
    return row is not None and '"do": "FinishJob"' not in str(row[0])  # of a damaged one: anything


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # none: text that is no text
    return code in _DAMAGED or code & 0xFF in _DAMAGED


def _readable_rows(path: Path) -> list[tuple[Any, ...]]:
    """Rows in order, up to the first that does not read or that is out of sequence."""
    rows: list[tuple[Any, ...]] = []
    try:
        db = sqlite3.connect(path)
    except sqlite3.DatabaseError:
        return rows
    try:
        db.execute("PRAGMA writable_schema = ON")  # reads a file that is shorter than it says
        for row in db.execute("SELECT * FROM transitions ORDER BY id"):
            if row[0] != len(rows) + 1 or not _reads(row):
                break
            rows.append(row)
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        pass
    finally:
        db.close()
    return rows


def _reads(row: tuple[Any, ...]) -> bool:
    """The row is what some driver wrote."""
    try:
        _id, kind, text, epoch, *times = row
        if kind == "state":
            _STATE.validate_json(text)
        else:
            _EVENTS[kind].validate_python(json.loads(text)["event"])
        return isinstance(epoch, int) and all(isinstance(t, float) for t in times)
    except (ValidationError, ValueError, KeyError, TypeError):
        return False


assert {cls.__name__ for cls in Event.__args__} <= set(vars(transitions)), "events are classes"
