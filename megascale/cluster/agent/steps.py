"""Follows a rank's line file: times of steps and incidents, as they are written (`events.py`).

Only whole lines are taken; what a crash tore is cut off by the next writer or completed by this
one, and the offset never stands inside a line. Spans, most of the file, are not parsed.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from megascale.cluster.messages import TEXT, Noticed, StepSums
from megascale.errors import DataError
from megascale.events import Incident, Step, Sums, parse_line

MOST_BYTES = 1 << 20  # a call
MOST_PENDING = 64  # sums whose step has not come
MOST_PHASES = 64
_ROUTINE = ("resources",)  # said every so many steps, and no news for the driver
_WANTED = (b'"kind":"sum"', b'"kind":"step"', b'"kind":"incident"')
_KIND_WITHIN = 32  # bytes: the kind is the second key of a line


class LineTail:
    """Reads from `offset` on, the end of a line. `num_lost`: bytes passed over, lines not known."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.num_lost = path, 0
        self._offset, self._inode = offset, None if offset == 0 else _inode(path)
        self._sums: OrderedDict[int, Sums] = OrderedDict()

    def read(self) -> Iterator[StepSums | Noticed]:
        """What is new, in the order of the file, of at most `MOST_BYTES`."""
        for line in self._new_lines():
            if not any(kind in line[:_KIND_WITHIN] for kind in _WANTED):
                continue
            try:
                found = self._of_event(line)
            except (DataError, ValueError):
                self.num_lost += 1
                continue
            if found is not None:
                yield found

    def _of_event(self, line: bytes) -> StepSums | Noticed | None:
        match parse_line(line):
            case Sums() as sums:
                self._sums[sums.step] = sums
                while len(self._sums) > MOST_PENDING:
                    self._sums.popitem(last=False)
            case Step() as step:
                before = self._sums.pop(step.step, None)
                times = {n: s["total_ns"] for n, s in before.sums.items()} if before else {}
                longest = sorted(times, key=lambda name: -times[name])[:MOST_PHASES]
                phases = {name: times[name] for name in longest}
                return StepSums(step=step.step, total_ns=step.dur_ns, phases=phases)
            case Incident() as incident if incident.name not in _ROUTINE:
                name = re.sub(r"[^\w.:@/+-]", "_", incident.name)[:200] or "unnamed"
                return Noticed(name=name, step=incident.step, detail=_bounded(incident.detail))
        return None

    def _new_lines(self) -> list[bytes]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            return []
        try:
            status = os.fstat(descriptor)
            if self._inode not in (None, status.st_ino) or status.st_size < self._offset:
                self._offset = 0  # replaced at a restart
                self._sums.clear()
            self._inode = status.st_ino
            data = os.pread(descriptor, MOST_BYTES, self._offset)
        except OSError:
            return []
        finally:
            os.close(descriptor)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == MOST_BYTES:  # no line of ours
            self._offset += len(data)
            self.num_lost += len(data)
        self._offset += end
        return data[:end].split(b"\n")


def _bounded(detail: object) -> dict[str, object]:
    """The detail as it is, or the beginning of its text."""
    text = json.dumps(detail)
    if not isinstance(detail, dict):
        return {"value": text[:TEXT]}
    return detail if len(text) <= TEXT else {"cut": text[:TEXT]}


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
