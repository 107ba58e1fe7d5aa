"""Digests of parameters, which ranks tell where they differ (`train/replicas.py`), kept until all
members of a data group have told theirs: then it is known who differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megascale.cluster.driver.program import Groups
from megascale.cluster.messages import Noticed
from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.replicas import differing_replicas


@dataclass
class _Told:
    """Of one comparison."""

    digests: dict[int, Mapping[str, str]] = field(default_factory=dict)
    agreed_steps: list[int] = field(default_factory=list)


class Replicas:
    """Of one epoch. By step; None: behind a load."""

    def __init__(self) -> None:
        self._told: dict[int | None, _Told] = defaultdict(_Told)

    def add(self, rank: int, noticed: Noticed) -> None:
        digests, agreed_step = noticed.detail.get("digests"), noticed.detail.get("agreed_step")
        if not isinstance(digests, dict):
            return
        told = self._told[noticed.step]
        told.digests[rank] = {str(bucket): str(value) for bucket, value in digests.items()}
        if isinstance(agreed_step, int):
            told.agreed_steps.append(agreed_step)

    def look(self, groups: Groups) -> Iterator[Finding]:
        """One for each comparison of which a data group's last member has told; then those groups
        are done. Other groups may be equal, and say nothing."""
        for step, told in self._told.items():
            whole = [
                members for members in groups.get("data", ()) if told.digests.keys() >= {*members}
            ]
            found = differing_replicas(told.digests, whole, step)
            for rank in {rank for members in whole for rank in members}:
                del told.digests[rank]
            if found is not None:
                more = {"agreed_step": min(told.agreed_steps)} if told.agreed_steps else {}
                if not found.certain:
                    more["majority"] = False
                yield replace(found, evidence={**found.evidence, **more})
