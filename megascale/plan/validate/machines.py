"""The clusters that the measured sets ran on, as cluster files with what differs changed.

All A100 sets share one device, one NVLink and one kind of NIC; only how many NICs a node has
differs, and each source says it. A fit hands in the same set of machines with its own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.load import load_cluster


@dataclass
class Machines:
    """`a100`: eight NICs a node (Selene, MosaicML); `a100_half_network`: four (vTrain's).

    *_triton  plain operators beside a flash kernel that is none of the old ones (MosaicML)
    """

    a100: Cluster
    paper: Cluster
    h100: Cluster
    h200: Cluster

    @cached_property
    def a100_half_network(self) -> Cluster:
        return changed(self.a100, {"network": {"nics_per_node": 4}})

    @cached_property
    def a100_triton(self) -> Cluster:
        return changed(self.a100, {"device": {"attention": {"plain": 1.0}}})

    @cached_property
    def h100_triton(self) -> Cluster:
        return changed(self.h100, {"device": {"attention": {"plain": 1.0}}})

    def with_a100(self, numbers: dict[str, Any]) -> Machines:
        """The same, with other numbers of the A100 and its links (sections as in its file)."""
        return Machines(
            changed(self.a100, numbers), changed(self.paper, numbers), self.h100, self.h200
        )


def load_machines() -> Machines:
    return Machines(*(load_cluster(name) for name in ("a100", "paper", "h100", "h200")))


def changed(cluster: Cluster, numbers: dict[str, Any]) -> Cluster:
    """`cluster` with other numbers, checked again and with nothing remembered."""
    return Cluster.model_validate(_merged(cluster.model_dump(exclude_unset=True), numbers))


def _merged(table: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    merged = dict(table)
    for key, value in numbers.items():
        old = merged.get(key)
        if isinstance(value, dict):
            merged[key] = _merged(old if isinstance(old, dict) else {}, value)
            continue
        merged[key] = value
        source = merged.get("source")
        if isinstance(source, dict) and key not in source:
            merged["source"] = {**source, key: "assumed: handed in by a caller"}
    return merged
