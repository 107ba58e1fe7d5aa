"""A machine of round numbers, for prices by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.groups import GroupShape
from megascale.plan.machine.links import moved_bytes
from megascale.plan.work.operations import Attention, Gemm, MemoryPass, Transfer


@dataclass(frozen=True)
class RoundDevice:
    launch_s: float = 0.0
    restart_s: float = 0.0


@dataclass(frozen=True)
class RoundMachine:
    """1e12 FLOP/s, 1e9 bytes/s of memory; links of 1e9 bytes/s, no latency, slow-downs as told."""

    flops: float = 1e12
    memory: float = 1e9
    inside: float = 1e9
    across: float = 1e9
    copies: float = 1e9
    latency_s: float = 0.0
    sigma: float = 1.0
    rho: float = 1.0
    devices_per_node: int = 8
    device: RoundDevice = field(default_factory=RoundDevice)

    def seconds(self, operation: Gemm | Attention | MemoryPass) -> float:
        if isinstance(operation, MemoryPass):
            return operation.num_bytes / self.memory
        return operation.flops / self.flops

    def transfer_s(
        self,
        transfer: Transfer,
        num_bytes: float,
        group: GroupShape,
        network_share: float = 1.0,
        *,
        copy_engine: bool = False,
    ) -> float:
        if group.ranks == 1:
            return 0.0
        rate = self.across * network_share if group.crosses_nodes else self.inside
        rate = self.copies if copy_engine else rate
        return self.latency_s + moved_bytes(transfer, num_bytes, group.ranks) / rate

    def link_of(self, group: GroupShape) -> str:
        return "network" if group.crosses_nodes else "nvlink"

    def slow_down(self, _link: str) -> float:
        return self.sigma

    def transfer_slow_down(self, _link: str) -> float:
        return self.rho

    @property
    def cluster(self) -> Cluster:
        """As what it stands for: `Pricer` asks no more of a cluster than this."""
        return cast(Cluster, self)
