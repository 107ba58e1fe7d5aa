"""What ranks printed: the end of a log, what came since, and the errors that ranks left, the first
first. A rank's number makes the name of its file; nothing else of a request does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TAIL_BYTES = 64 << 10
MOST_BYTES = 256 << 10
MOST_ERRORS = 50
MOST_MESSAGE = 4000  # characters


def tail(run_dir: Path, rank: int, after: int | None) -> dict[str, Any]:
    """The last lines of the log of global rank `rank`, or what came behind byte `after`.

    next   what to give as `after` next time
    start  the byte at which `text` begins; behind `after` where there was more than fits, and 0
           where the file was replaced
    why    why there is none, where it cannot be read
    """
    path = run_dir / "logs" / f"rank{rank:05d}.log"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole = after is not None and after <= size
            begin = after if whole and after is not None else 0
            begin = max(begin, size - (MOST_BYTES if whole else TAIL_BYTES))
            file.seek(begin)
            data = file.read(size - begin)
    except OSError as error:
        why = f"rank {rank} has no log that can be read ({error.strerror})"
        return {"rank": rank, "start": 0, "next": 0, "text": "", "why": why}
    cut = data.find(b"\n") + 1 if begin and begin != after else 0  # not half a line
    return {
        "rank": rank,
        "start": begin + cut,
        "next": begin + len(data),
        "text": data[cut:].decode(errors="replace"),
        "why": "",
    }


def first_errors(run_dir: Path) -> dict[str, Any]:
    """What ranks that failed left as their error, in order of time, and which ranks have logs."""
    errors, ranks = [], []
    for entry in _entries(run_dir / "logs"):
        name = entry.name
        number = name.removeprefix("error-").removeprefix("rank").partition(".")[0]
        if not (number.isdecimal() and number.isascii()):
            continue
        if name == f"rank{number}.log":
            ranks.append(int(number))
        elif name == f"error-rank{number}.json":
            errors.append(_error(Path(entry.path), int(number)))
    known = sorted((one for one in errors if one is not None), key=lambda one: one["unix_s"])
    return {"errors": known[:MOST_ERRORS], "num_errors": len(known), "ranks": sorted(ranks)}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # nobody has printed anything yet


def _error(path: Path, rank: int) -> dict[str, Any] | None:
    """None: not JSON of that kind, perhaps half written."""
    try:
        said = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return {
            "rank": rank,
            "unix_s": int(said["time_ns"]) / 1e9,
            "message": str(said["message"])[:MOST_MESSAGE],
            "exit_code": said.get("exit_code"),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
