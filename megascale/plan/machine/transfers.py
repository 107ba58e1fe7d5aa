"""Prices of transfers: inside a node along measured lines, between nodes by `links.py`.

A line is that of one kind of transfer among as many ranks. Another number of ranks takes the line
of the nearest: as much as it asks for the same bytes over a link, and its own number of steps.
"""

from __future__ import annotations

from math import log

from megascale.plan.machine.groups import GroupShape
from megascale.plan.machine.links import (
    Network,
    NodeLink,
    across_s,
    inside_s,
    latency_s,
    moved_bytes,
    ring_steps,
)
from megascale.plan.machine.samples import CollectiveSample
from megascale.plan.machine.surface import Line
from megascale.plan.work.operations import Transfer


class SampledLinks:
    """`seconds` of transfers on a cluster's links, with `samples` of those in a node (or none)."""

    def __init__(
        self,
        nvlink: NodeLink,
        network: Network | None,
        devices_per_node: int,
        samples: tuple[CollectiveSample, ...],
    ) -> None:
        self._nvlink, self._network = nvlink, network
        self._devices_per_node = devices_per_node
        self._nccl = self._lines(samples, "nvlink")
        self._copies = self._lines(samples, "copy_engine")

    def inside_s(self, transfer: Transfer, num_bytes: float, ranks: int) -> float:
        """By NCCL in a node."""
        lines = self._nccl.get(transfer)
        if lines is None:
            return inside_s(self._nvlink, transfer, num_bytes, ranks)
        nearest = min(lines, key=lambda other: (abs(log(other / ranks)), -other))
        moved = moved_bytes(transfer, num_bytes, ranks)
        alike = num_bytes * moved / moved_bytes(transfer, num_bytes, nearest)
        more = ring_steps(transfer, ranks) - ring_steps(transfer, nearest)
        seconds = lines[nearest].seconds(alike) + more * self._nvlink.step_s
        return max(seconds, self._nvlink.base_s, moved / (self._nvlink.gb_s * 1e9))

    def copied_s(self, transfer: Transfer, num_bytes: float, ranks: int) -> float:
        """By copy engines in a node, every device at once."""
        moved = moved_bytes(transfer, num_bytes, ranks)
        fastest = self._nvlink.gb_s * 1e9
        lines = self._copies.get(Transfer.SEND)
        if lines is None:
            return self._nvlink.step_s + moved / (fastest * self._nvlink.copy_engine)
        nearest = min(lines, key=lambda other: (abs(log(other / ranks)), -other))
        return max(lines[nearest].seconds(moved), moved / fastest)

    def across_s(
        self, transfer: Transfer, num_bytes: float, group: GroupShape, network_share: float
    ) -> float:
        """Between nodes; `network_share` of the NICs' bandwidth is left."""
        assert self._network is not None, group
        nics = group.ranks_per_node * self._network.nics_per_node / self._devices_per_node
        bytes_per_s = self._network.nic_gb_s * 1e9 * nics * network_share
        return across_s(self._network, self._nvlink, transfer, num_bytes, group, bytes_per_s)

    def _lines(
        self, samples: tuple[CollectiveSample, ...], link: str
    ) -> dict[Transfer, dict[int, Line]]:
        """By transfer and ranks."""
        points: dict[Transfer, dict[int, list[tuple[float, float]]]] = {}
        for s in samples:
            if s.link == link and s.ranks > 1:
                of_ranks = points.setdefault(s.transfer, {}).setdefault(s.ranks, [])
                of_ranks.append((s.num_bytes, s.seconds))
        return {
            transfer: {
                ranks: Line(of_ranks, latency_s(self._nvlink, transfer, ranks))
                for ranks, of_ranks in by_ranks.items()
            }
            for transfer, by_ranks in points.items()
        }
