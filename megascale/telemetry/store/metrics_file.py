"""metrics.jsonl as its readers see it: every line, and which of them still count. Pure but for the
file.

Rank 0 writes a line a logged step and appends after a restart, so steps come again. A line counts
where no later line is of its step or of one before it: what a restart went back behind is void,
also where nobody has come to its step again yet.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_metrics(path: Path, starts_unix_ns: Sequence[int]) -> tuple[list[dict[str, Any]], int]:
    """(lines, number of lines that are no JSON). A line's `start` is the last of `starts_unix_ns`
    before its time; an unfinished last line is left out."""
    try:
        content = path.read_bytes()
    except OSError:
        return [], 0
    lines, bad = [], 0
    for line in content.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
            record["start"] = max(0, bisect_right(starts_unix_ns, record["time"] * 1e9) - 1)
            int(record["step"])
        except (ValueError, KeyError, TypeError):
            bad += 1
            continue
        lines.append(record)
    least: int | None = None
    for record in reversed(lines):
        record["current"] = least is None or record["step"] < least
        if record["current"]:
            least = record["step"]
    return lines, bad
