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
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MetricsFile:
    """lines    each with its `start` and whether it counts (`current`)
    num_bad  how many are no JSON, or none of ours
    """

    lines: list[dict[str, Any]]
    num_bad: int


def read_metrics(path: Path, starts_unix_ns: Sequence[int]) -> MetricsFile:
    """A line's `start` is the last of `starts_unix_ns` before its time. An unfinished last line is
    left out; of a file that is not there nothing is bad."""
    try:
        content = path.read_bytes()
    except OSError:
        return MetricsFile([], 0)
    lines, num_bad = [], 0
    for line in content.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
            record["start"] = max(0, bisect_right(starts_unix_ns, record["time"] * 1e9) - 1)
            int(record["step"])
        except (ValueError, KeyError, TypeError):
            num_bad += 1
            continue
        lines.append(record)
    least: int | None = None
    for record in reversed(lines):
        record["current"] = least is None or record["step"] < least
        if record["current"]:
            least = record["step"]
    return MetricsFile(lines, num_bad)
