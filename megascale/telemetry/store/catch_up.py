"""Stores what the line files hold and no segment does, here and now, for who reads a run.

So a run needs no process beside it: its readers are its store. They take the lock that a store
process holds for its life; where they do not get it, somebody else stores and they read on.
A run folder that cannot be written (somebody else's, on a read-only disk, or on a full one) is
stored under the temporary folder, beginning with the segments that it has.

Memory is a batch (`writing.FLUSH_BYTES`) however large the run: 10 GB of lines in 32 MB pieces. Of
files that grow meanwhile, what was there at the beginning is stored.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.config import TelemetryConfig
from megascale.errors import DataError
from megascale.telemetry.path.line_files import LineFile, list_line_files, telemetry_folder
from megascale.telemetry.path.queue import MOST_BYTES as MOST_READ_BYTES
from megascale.telemetry.store.merging import merge_what_is_due
from megascale.telemetry.store.retention import retain
from megascale.telemetry.store.segments import live_segments, store_folder
from megascale.telemetry.store.writing import FLUSH_BYTES, StoreLock, StoreWriter

MERGE_ABOVE = 24  # segments
LOCK_WAIT_S = 5.0  # for another reader that catches up; a store process holds it for its life
_ASK_S = 0.05
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class CaughtUp:
    """
    folder      where the segments lie
    num_bytes   of lines that were stored by this call
    left_bytes  that are not stored yet, by the deadline
    is_held     a store process does it; nothing was done here
    """

    folder: Path
    num_bytes: int = 0
    left_bytes: int = 0
    is_held: bool = False


def catch_up(
    run_dir: Path, *, deadline_s: float | None = None, progress: Progress | None = None
) -> CaughtUp:
    """Store what is new of a run, all of it or what can be done by the deadline.

    progress  called with (bytes done, bytes to do) at every commit
    DataError: the store is of another version, or the disk of the temporary folder is full, too.
    """
    folder = store_folder(run_dir)
    if not telemetry_folder(run_dir).is_dir():
        return CaughtUp(folder)
    give_up_s = None if deadline_s is None else time.monotonic() + deadline_s
    try:
        return _catch_up_in(run_dir, folder, give_up_s, progress)
    except OSError:
        pass
    except DataError:
        if not _is_disk_full(folder):
            raise
    return _catch_up_in(run_dir, _folder_elsewhere(run_dir), give_up_s, progress)


def _catch_up_in(
    run_dir: Path, folder: Path, give_up_s: float | None, progress: Progress | None
) -> CaughtUp:
    """OSError: the folder cannot be written. DataError: a segment cannot."""
    lock = StoreLock(folder)
    if not _acquire(lock, give_up_s):
        return CaughtUp(folder, is_held=True)
    with lock:
        _bring_along(store_folder(run_dir), folder)
        done, left = _store(run_dir, folder, give_up_s, progress)
    return CaughtUp(folder, done, left)


def _is_disk_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < FLUSH_BYTES


def _store(
    run_dir: Path, folder: Path, give_up_s: float | None, progress: Progress | None
) -> tuple[int, int]:
    """Bytes stored, bytes left."""
    writer = StoreWriter(folder)
    todo = _to_read(run_dir, writer)
    total = sum(end - file.position for file, end in todo)
    done = 0
    while todo and (give_up_s is None or time.monotonic() < give_up_s):
        still = []
        for file, end in todo:
            before = file.position
            message = file.read(MOST_READ_BYTES)
            if message is not None:
                writer.admit(message)
                done += max(file.position - before, 0)
                if file.position < end:
                    still.append((file, end))
            if writer.is_full:
                writer.commit()
                if progress is not None:
                    progress(done, total)
        todo = still
    if writer.commit() and progress is not None:
        progress(done, total)
    while len(live_segments(folder)) > MERGE_ABOVE and merge_what_is_due(folder):
        pass
    if done:
        keep_bytes = _keep_gb(run_dir) * 1e9
        retain(folder, keep_bytes=keep_bytes, keep_s=math.inf, now_s=time.time())
    return done, sum(max(end - file.position, 0) for file, end in todo)


def _to_read(run_dir: Path, writer: StoreWriter) -> list[tuple[LineFile, int]]:
    """Files that have more than is stored, each with the position up to which it is to be read."""
    todo = []
    for name, rank in list_line_files(run_dir).items():
        file = LineFile(telemetry_folder(run_dir) / name, rank)
        try:
            source = file.identify()
            size = file.path.stat().st_size
        except OSError:
            continue  # it is gone, or not ours to read: its rank is missing, which readers say
        if source is not None:
            file.go_to(writer.stands_at(source))
            if file.offset != size:
                todo.append((file, file.position - file.offset + size))
    return todo


def _keep_gb(run_dir: Path) -> float:
    """`telemetry.keep_gb` of the run. Its age is no reason here: an old run is read to be seen."""
    try:
        return float(json.loads((run_dir / "config.json").read_text())["telemetry"]["keep_gb"])
    except (OSError, ValueError, KeyError, TypeError):
        return TelemetryConfig().keep_gb


def _acquire(lock: StoreLock, give_up_s: float | None) -> bool:
    """Wait a little: another reader has it for as long as it catches up."""
    until_s = time.monotonic() + LOCK_WAIT_S
    until_s = until_s if give_up_s is None else min(until_s, give_up_s)
    while not lock.acquire():
        if lock.is_for_life() or time.monotonic() >= until_s:
            return False
        time.sleep(_ASK_S)
    return True


def _folder_elsewhere(run_dir: Path) -> Path:
    """A store of this user's own for a run folder that cannot be written."""
    name = hashlib.blake2b(os.fsencode(run_dir.resolve()), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"megascale-store-{os.getuid()}" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"neither {store_folder(run_dir)} nor {folder} can be written ({error}); set TMPDIR to "
            "a folder with room"
        ) from None
    if folder.parent.stat().st_uid != os.getuid():
        raise DataError(f"{folder.parent} belongs to somebody else; set TMPDIR to another folder")
    return folder


def _bring_along(source: Path, folder: Path) -> None:
    """What is stored already, where the store is elsewhere and empty."""
    if source == folder or live_segments(folder):
        return
    for segment in live_segments(source):
        aside = folder / f".aside-{segment.path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(segment.path, aside)
        os.rename(aside, folder / segment.path.name)
