"""RDMA ports as the detectors want them: bytes a step, and all ports' settings, of all nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megascale.cluster.driver.links import is_rdma
from megascale.cluster.job import JobState
from megascale.cluster.messages import NicReport
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.nic_settings import differing_settings
from megascale.telemetry.diagnose.traffic import Port, bytes_per_step, changed

KEPT_STEPS = 64
SAMPLES = 128
_IS_BYTES = ("bytes", "_data")


class Ports:
    """Samples by (node, port); one a second is enough."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], deque[tuple[int, int]]] = {}
        self._settings: dict[str, dict[str, dict[str, str]]] = {}
        self._judged: int | None = None

    def look(
        self, reports: dict[str, Sequence[NicReport]], job: JobState, step: int | None
    ) -> Iterator[Finding]:
        told = False
        for node, nics in reports.items():
            for nic in nics:
                if nic.settings and self._settings.get(node, {}).get(nic.name) != nic.settings:
                    self._settings.setdefault(node, {})[nic.name] = nic.settings
                    told = True
                if step is not None and nic.counters and is_rdma(nic.name):
                    samples = self._samples.setdefault((node, nic.name), deque(maxlen=SAMPLES))
                    samples.append((step, _bytes(nic)))
        ranks_of = {name: list(job.ranks_of(job.nodes[name])) for name in job.holders.values()}
        if told:
            settings = {node: of for node, of in self._settings.items() if node in ranks_of}
            found = differing_settings(settings, ranks_of)
            if found is not None:
                yield found
        if step is not None and step != self._judged:
            self._judged = step
            yield from self._traffic(ranks_of, step)

    def _traffic(self, ranks_of: dict[str, list[int]], step: int) -> list[Finding]:
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
        known_S = ~np.isnan(bytes_SP).all(axis=1)
        return changed(bytes_SP[known_S], ports, step - 1) if known_S.any() else []


def _bytes(nic: NicReport) -> int:
    return sum(value for name, value in nic.counters.items() if name.endswith(_IS_BYTES))
