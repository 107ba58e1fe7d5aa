"""Ports of all nodes as the detectors want them: their traffic, settings, errors and light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from megascale.cluster.driver.digest import Digest
from megascale.cluster.driver.progress import MEDIANS, SAVING
from megascale.cluster.driver.traffic import Traffic
from megascale.cluster.job import OVER, JobState
from megascale.cluster.messages import NicReport
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.nic_health import ERRORS, dark_optics, erring_ports
from megascale.telemetry.diagnose.nic_settings import differing_settings

COUNTED_S = 300.0  # errors are compared over such times
_REST = SAVING | {"done", "init"}


class Ports:
    """Of the nodes that hold ranks."""

    def __init__(self) -> None:
        self._traffic = Traffic()
        self._settings: dict[str, dict[str, dict[str, str]]] = {}
        self._counted: dict[str, dict[str, dict[str, int]]] = {}
        self._first: dict[str, dict[str, dict[str, int]]] = {}
        self._first_s: float | None = None

    def begin(self, job: JobState | None) -> None:
        """Another epoch."""
        self._traffic.begin(None if job is None else (job.world_size, job.overrides))

    def look(self, digest: Digest, job: JobState) -> Iterator[Finding]:
        reports, now_s, step = digest.take_nics(), digest.heard_s, digest.step
        here = {node.name for node in job.nodes.values() if node.state not in OVER}
        self._forget_all_but(here)
        told = [self._take(node, nics, now_s) for node, nics in reports.items() if node in here]
        ranks_of = {name: list(job.ranks_of(job.nodes[name])) for name in job.holders.values()}
        if any(told):  # spares' too: they are compared, and say what is usual
            settings = self._settings
            for found in (differing_settings(settings, ranks_of), dark_optics(settings, ranks_of)):
                if found is not None:
                    yield found
        yield from self._errors(ranks_of, now_s)
        if step is None:
            return
        phases = {
            seen.report.progress.phase for seen in digest.ranks.values() if seen.report.progress
        }
        if phases & _REST:
            self._traffic.rest(now_s)
        else:
            least_s = MEDIANS * (digest.median_step_s or 0.0)
            stopped = self._traffic.pauses(ranks_of, now_s, least_s)
            if stopped is not None:
                yield stopped
        cluster = job.policy.cluster
        lasting = cluster.straggler_windows * cluster.straggler_window
        yield from self._traffic.changes(ranks_of, now_s, step, lasting)

    def _forget_all_but(self, here: Set[str]) -> None:
        for of in (self._settings, self._counted, self._first):
            for node in of.keys() - here:
                of.pop(node)

    def _take(self, node: str, nics: Sequence[NicReport], now_s: float) -> bool:
        """True where settings are new."""
        told = False
        for nic in nics:
            if nic.settings and self._settings.get(node, {}).get(nic.name) != nic.settings:
                self._settings.setdefault(node, {})[nic.name] = nic.settings
                told = True
            counted = {name: nic.counters[name] for name in nic.counters.keys() & ERRORS}
            self._counted.setdefault(node, {})[nic.name] = counted
        self._traffic.add(node, nics, now_s)
        return told

    def _errors(self, ranks_of: Mapping[str, Sequence[int]], now_s: float) -> Iterator[Finding]:
        """Of COUNTED_S that are over. A counter that fell was reset, and counts from zero."""
        if self._first_s is None:
            self._first_s, self._first = now_s, _copied(self._counted)
        if now_s - self._first_s < COUNTED_S:
            return
        growth: dict[str, dict[str, dict[str, int]]] = {}
        for node, ports in self._counted.items():
            before = self._first.get(node)
            if node in ranks_of and before is not None:
                growth[node] = {
                    port: {
                        name: count - min(count, before[port].get(name, count))
                        for name, count in of.items()
                    }
                    for port, of in ports.items()
                    if port in before
                }
        self._first_s, self._first = now_s, _copied(self._counted)
        found = erring_ports(growth, ranks_of)
        if found is not None:
            yield found


def _copied(counted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {node: dict(ports) for node, ports in counted.items()}
