"""RDMA traffic while a job trains: what stopped, fell, fluctuates (MegaScale 4.2).

| what | is told as |
|---|---|
| ports of a node that moved bytes and do not, while others do | certain: recovery at once |
| all ports | certain, without ranks: the job stands still, whose fault it is the stacks say |
| a port's bytes a step fell, or fluctuate | an alert, once |
| that lasts for `straggler_windows` windows | certain: its node is isolated |

A node that was not heard is left out: its silence is judged elsewhere. Traffic rests while ranks
save or validate, so what was seen until then says nothing about a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megascale.cluster.driver.links import is_rdma
from megascale.cluster.messages import NicReport
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.traffic import (
    BASELINE_STEPS,
    CONFIRM,
    Port,
    bytes_per_step,
    changed,
    stopped,
    usual_bytes,
)

Key = tuple[str, str]  # node, port
KEPT_STEPS = 64
SAMPLES = 128
FRESH_S = 2.5  # an older report says nothing about now
_IS_BYTES = ("bytes", "_data")


class Traffic:
    """Samples by (node, port); one a second is enough. `begin` with each epoch."""

    def __init__(self) -> None:
        self._samples: dict[Key, deque[tuple[int, int]]] = {}
        self._judged: int | None = None
        self.begin()

    def begin(self) -> None:
        self._moments: deque[tuple[float, dict[Key, int]]] = deque(maxlen=SAMPLES)
        self._newest: dict[Key, tuple[float, int]] = {}
        self._since: dict[tuple[str, str], int] = {}  # kind, node
        self._last: dict[tuple[str, str], int] = {}
        self._isolated: set[tuple[str, str]] = set()
        self._usual: dict[Key, float] = {}

    def add(self, node: str, nics: Sequence[NicReport], now_s: float, step: int | None) -> None:
        for nic in nics:
            if nic.counters and is_rdma(nic.name):
                key, count = (node, nic.name), _bytes(nic)
                self._newest[key] = (now_s, count)
                if step is not None:
                    samples = self._samples.setdefault(key, deque(maxlen=SAMPLES))
                    samples.append((step, count))

    def rest(self) -> None:
        """Ranks are in a phase that moves no bytes."""
        self._moments.clear()

    def pauses(
        self, ranks_of: Mapping[str, Sequence[int]], now_s: float, least_s: float
    ) -> Finding | None:
        """Has traffic stopped for `least_s` and much longer than it ever paused?"""
        fresh = {
            key: count
            for key, (at_s, count) in self._newest.items()
            if key[0] in ranks_of and now_s - at_s <= FRESH_S
        }
        self._moments.append((now_s, fresh))
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
        self, ranks_of: Mapping[str, Sequence[int]], step: int, lasting_steps: int
    ) -> Iterator[Finding]:
        """An alert for each node where traffic fell or fluctuates, and once more, certain, when it
        has been so for `lasting_steps`."""
        if step == self._judged:
            return
        self._judged = step
        for finding in self._changed(ranks_of, step):
            nodes = {where.rsplit("/", 2)[0] for where in finding.evidence["relative"]}
            for node in sorted(nodes):
                episode = (finding.kind, node)
                is_new = episode not in self._since
                since = self._since.setdefault(episode, step)
                self._last[episode] = step
                lasts = step - since >= lasting_steps and episode not in self._isolated
                if is_new or lasts:
                    self._isolated |= {episode} if lasts else set()
                    own = {
                        w: v
                        for w, v in finding.evidence["relative"].items()
                        if w.startswith(f"{node}/")
                    }
                    yield replace(
                        finding,
                        ranks=tuple(ranks_of[node]),
                        evidence={"relative": own, "steps": step - since + 1},
                        certain=lasts,
                    )
        for episode in [e for e, last in self._last.items() if step - last > CONFIRM]:
            del self._since[episode], self._last[episode]
            self._isolated.discard(episode)
        troubled = {node for _, node in self._since}
        self._usual = {key: of for key, of in self._usual.items() if key[0] in troubled}

    def _changed(self, ranks_of: Mapping[str, Sequence[int]], step: int) -> list[Finding]:
        ports: list[Port] = []
        rows: list[list[float]] = []
        for (node, name), samples in sorted(self._samples.items()):
            if node in ranks_of:
                known = bytes_per_step([s for s, _ in samples], [count for _, count in samples])
                ports.append(Port(node, name, tuple(ranks_of[node])))
                first = step - KEPT_STEPS
                rows.append([known.get(s, np.nan) for s in range(first + 1, step)])
        if not rows:
            return []
        bytes_SP: Any = np.array(rows).T
        bytes_SP = bytes_SP[~np.isnan(bytes_SP).all(axis=1)]
        if len(bytes_SP) < BASELINE_STEPS + CONFIRM:
            return []
        usual_P = usual_bytes(bytes_SP)
        keys = [(port.node, port.name) for port in ports]
        usual_P = np.array(
            [self._usual.get(key, of) for key, of in zip(keys, usual_P, strict=True)]
        )
        found = changed(bytes_SP, ports, step - 1, usual_P)
        told = {where for finding in found for where in finding.evidence["relative"]}
        for key, usual in zip(keys, usual_P, strict=True):
            if "/".join(key) in told:
                self._usual.setdefault(key, float(usual))
        return found


def _bytes(nic: NicReport) -> int:
    return sum(value for name, value in nic.counters.items() if name.endswith(_IS_BYTES))
