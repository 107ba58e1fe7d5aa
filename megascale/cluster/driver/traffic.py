"""RDMA traffic while a job trains: what stopped, fell, fluctuates (MegaScale 4.2).

| what | is told as |
|---|---|
| ports of a node that moved bytes and do not, while others do | certain: recovery at once |
| all ports | certain, without ranks: the job stands still, whose fault it is the stacks say |
| a port's bytes a step fell, or fluctuate | an alert, once |
| that lasts for `straggler_windows` times `straggler_window` steps | certain: isolate the node |

A node that was not heard is left out: its silence is judged elsewhere. Traffic rests while ranks
save or validate, and that time is no pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megascale.cluster.driver.links import is_rdma
from megascale.cluster.messages import NicReport
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.traffic import (
    BASELINE_STEPS,
    CONFIRM,
    Port,
    changed,
    stopped,
    usual_bytes,
)

Key = tuple[str, str]  # node, port
ROW_S = 20.0
"""A row of bytes a step is of so many seconds at least: counters and steps are up to a second old
when they come, which of a shorter time would be too large a part."""
KEPT_ROWS = 64
MOMENTS = 128
FRESH_S = 2.5  # an older report says nothing about now
_IS_BYTES = ("bytes", "_data")


@dataclass
class _Episode:
    """Trouble at one node. rows_ago: when it was seen last."""

    since: int
    rows_ago: int = -1
    is_told: bool = False


class Traffic:
    """One look a second is enough. `begin` with each epoch.

    Rows of an epoch are compared with those of the one before, unless a step is another one now.
    """

    def __init__(self) -> None:
        self._begin_rows(None)
        self.begin(None)

    def _begin_rows(self, of: Hashable) -> None:
        self._of = of
        self._rows: deque[dict[Key, float]] = deque(maxlen=KEPT_ROWS)
        self._episodes: dict[tuple[str, str], _Episode] = {}  # by kind and node
        self._usual: dict[Key, float] = {}

    def begin(self, of: Hashable) -> None:
        """of: what bytes a step depend on, the world's size and the job's settings."""
        if of != self._of:
            self._begin_rows(of)
        self._moments: deque[tuple[float, dict[Key, int]]] = deque(maxlen=MOMENTS)
        self._active_s = 0.0
        self._looked_s: float | None = None
        self._newest: dict[Key, tuple[float, int]] = {}
        self._row: tuple[float, int, dict[Key, int]] = (float("-inf"), -1, {})

    def add(self, node: str, nics: Sequence[NicReport], now_s: float) -> None:
        for nic in nics:
            if nic.counters and is_rdma(nic.name):
                self._newest[node, nic.name] = (now_s, _bytes(nic))

    def rest(self, now_s: float) -> None:
        """Ranks are in a phase that moves no bytes: this time does not count."""
        self._looked_s = now_s

    def pauses(
        self, ranks_of: Mapping[str, Sequence[int]], now_s: float, least_s: float
    ) -> Finding | None:
        """Has traffic stopped for `least_s` and much longer than it ever paused?"""
        fresh = {
            key: count
            for key, (at_s, count) in self._newest.items()
            if key[0] in ranks_of and now_s - at_s <= FRESH_S
        }
        if self._looked_s is not None:
            self._active_s += now_s - self._looked_s
        self._looked_s = now_s
        self._moments.append((self._active_s, fresh))
        known = sorted(fresh)
        ports = [Port(node, name, tuple(ranks_of[node])) for node, name in known]
        rows = [(at_s, of) for at_s, of in self._moments if of.keys() >= fresh.keys()]
        if not ports or len(rows) < len(self._moments) / 2:
            return None
        times_T = np.array([at_s for at_s, _ in rows])
        counters_TP = np.array([[of[key] for key in known] for _, of in rows], dtype=float)
        found = stopped(times_T, counters_TP, ports)
        if found is None or min(found.evidence["quiet_s"].values()) < least_s:
            return None
        return found

    def changes(
        self, ranks_of: Mapping[str, Sequence[int]], now_s: float, step: int, lasting_steps: int
    ) -> Iterator[Finding]:
        """An alert for each node where traffic fell or fluctuates, and once more, certain, when it
        has been so for `lasting_steps`. Judged once a row."""
        if not self._add_row(now_s, step):
            return
        for finding in self._changed(ranks_of, step):
            relative = finding.evidence["relative"]
            for node in sorted({where.rsplit("/", 2)[0] for where in relative}):
                key = (finding.kind, node)
                is_new = key not in self._episodes
                episode = self._episodes.setdefault(key, _Episode(step))
                episode.rows_ago = -1
                lasts = step - episode.since >= lasting_steps and not episode.is_told
                episode.is_told |= lasts
                if is_new or lasts:
                    yield replace(
                        finding,
                        ranks=tuple(ranks_of[node]),
                        evidence={
                            "relative": {
                                at: of for at, of in relative.items() if at.startswith(f"{node}/")
                            },
                            "steps": step - episode.since,
                        },
                        certain=lasts,
                    )
        for episode in self._episodes.values():
            episode.rows_ago += 1
        self._episodes = {k: e for k, e in self._episodes.items() if e.rows_ago <= CONFIRM}
        troubled = {node for _, node in self._episodes}
        self._usual = {key: of for key, of in self._usual.items() if key[0] in troubled}

    def _add_row(self, now_s: float, step: int) -> bool:
        """Bytes a step of each port since the last row, where enough time has passed."""
        row_s, row_step, before = self._row
        if now_s - row_s < ROW_S or step <= row_step:
            return False
        now = {key: n for key, (at_s, n) in self._newest.items() if now_s - at_s <= FRESH_S}
        self._row = (now_s, step, now)
        if not before:
            return False
        self._rows.append(
            {
                key: (count - before[key]) / (step - row_step)
                for key, count in now.items()
                if count >= before.get(key, count + 1)
            }
        )
        return True

    def _changed(self, ranks_of: Mapping[str, Sequence[int]], step: int) -> list[Finding]:
        keys = sorted({key for row in self._rows for key in row if key[0] in ranks_of})
        if not keys or len(self._rows) < BASELINE_STEPS + CONFIRM:
            return []
        ports = [Port(node, name, tuple(ranks_of[node])) for node, name in keys]
        bytes_SP: Any = np.array([[row.get(key, np.nan) for key in keys] for row in self._rows])
        usual = zip(keys, usual_bytes(bytes_SP), strict=True)
        usual_P = np.array([self._usual.get(key, of) for key, of in usual])
        found = changed(bytes_SP, ports, step, usual_P)
        told = {where for finding in found for where in finding.evidence["relative"]}
        for key, of in zip(keys, usual_P, strict=True):
            if "/".join(key) in told:
                self._usual.setdefault(key, float(of))
        return found


def _bytes(nic: NicReport) -> int:
    return sum(value for name, value in nic.counters.items() if name.endswith(_IS_BYTES))
