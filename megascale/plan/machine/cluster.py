"""A cluster: device, node, network; and what an operation or a transfer costs on it.

Read from a TOML file (`load.py`). Every number says where it comes from (`sourced.py`). Prices are
pure functions of sizes, remembered; they grow with every size and are never below the roofline.
Effects of scale (conflicts, stragglers) are not here: `network_share` hands them in.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from megascale.plan.machine.device import Device
from megascale.plan.machine.groups import GroupShape
from megascale.plan.machine.links import Fabric, Network, NodeLink, across_s, inside_s, moved_bytes
from megascale.plan.machine.sourced import Sourced
from megascale.plan.work.operations import Attention, Gemm, MemoryPass, Transfer

LinkName = Literal["nvlink", "network", "copy_engine", "host"]


class Overlap(Sourced):
    """Compute and a transfer side by side: factors >= 1 on each one's time, by link.

    NCCL's kernels take SMs and memory bandwidth from the compute beside them; copy engines take
    memory bandwidth alone.
    """

    compute_nvlink: float = Field(ge=1.0, le=10.0, description="compute beside NCCL in a node")
    compute_network: float = Field(ge=1.0, le=10.0, description="compute beside NCCL on NICs")
    compute_copy_engine: float = Field(ge=1.0, le=10.0, description="compute beside copy engines")
    transfer_nvlink: float = Field(ge=1.0, le=10.0, description="NCCL in a node beside compute")
    transfer_network: float = Field(ge=1.0, le=10.0, description="NCCL on NICs beside compute")
    transfer_copy_engine: float = Field(ge=1.0, le=10.0, description="copies beside compute")


class Cluster(Sourced):
    """See the module. `num_devices` are used where nobody says how many; at most `most_devices`."""

    name: str
    notes: str = ""
    num_devices: int = Field(ge=1, le=1_000_000)
    most_devices: int | None = Field(None, ge=1, description="default: num_devices")
    devices_per_node: int = Field(ge=1, le=1_024)
    device: Device
    nvlink: NodeLink
    network: Network | None = None
    fabric: Fabric | None = None
    overlap: Overlap

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        per_node = self.devices_per_node
        if self.num_devices > per_node and self.num_devices % per_node:
            below = self.num_devices // per_node * per_node
            raise ValueError(
                f"num_devices {self.num_devices} leaves a node uneven: nodes have "
                f"{per_node} devices; nearest legal: {below} or {below + per_node}"
            )
        if self.num_devices > self.limit:
            raise ValueError(
                f"num_devices {self.num_devices} is above most_devices {self.limit}; "
                "raise most_devices or lower num_devices"
            )
        if self.limit > per_node and self.network is None:
            raise ValueError(
                f"{self.limit} devices are {-(-self.limit // per_node)} nodes, but there is no "
                f"[network]; add one, or have at most {per_node} devices"
            )
        if self.network is not None and self.network.nic_gb_s > self.nvlink.gb_s:
            raise ValueError(
                f"network.nic_gb_s {self.network.nic_gb_s:g} is faster than nvlink.gb_s "
                f"{self.nvlink.gb_s:g} inside a node; are the units GB/s, one way? nearest legal: "
                f"network.nic_gb_s at most {self.nvlink.gb_s:g}"
            )
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.num_devices, self.device.name))

    @property
    def limit(self) -> int:
        return self.most_devices if self.most_devices is not None else self.num_devices

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)

    @cached_property
    def _remembered(self) -> dict[Any, float]:
        return {}

    def seconds(self, operation: Gemm | Attention | MemoryPass) -> float:
        """Seconds of the device for `operation`, the gap to the next kernel included."""
        found = self._remembered.get(operation)
        if found is None:
            roof_s = self.device.roofline_s(operation)
            found = max(roof_s, self.device.parametric_s(operation))
            self._remembered[operation] = found
        return found

    def transfer_s(
        self,
        transfer: Transfer,
        num_bytes: float,
        group: GroupShape,
        network_share: float = 1.0,
        *,
        copy_engine: bool = False,
    ) -> float:
        """Seconds of one transfer of a tensor of `num_bytes` in all (see `Collective`).

        network_share  of the network's bandwidth that is left (effects of scale); not of NVLink
        copy_engine    by copies between peers of a node rather than by NCCL's kernels
        """
        assert 0.0 < network_share <= 1.0, network_share
        if group.ranks == 1 or num_bytes <= 0.0:
            return 0.0
        key = (transfer, num_bytes, group, network_share, copy_engine)
        found = self._remembered.get(key)
        if found is None:
            found = self._transfer_s(transfer, num_bytes, group, network_share, copy_engine)
            self._remembered[key] = found
        return found

    def _transfer_s(
        self,
        transfer: Transfer,
        num_bytes: float,
        group: GroupShape,
        network_share: float,
        copy_engine: bool,
    ) -> float:
        if not group.crosses_nodes:
            if copy_engine:
                bytes_per_s = self.nvlink.gb_s * 1e9 * self.nvlink.copy_engine
                return self.nvlink.step_s + moved_bytes(transfer, num_bytes, group.ranks) / (
                    bytes_per_s
                )
            return inside_s(self.nvlink, transfer, num_bytes, group.ranks)
        assert self.network is not None, (self.name, group)
        assert not copy_engine, f"copy engines do not cross nodes: {group}"
        nics = group.ranks_per_node * self.network.nics_per_node / self.devices_per_node
        return across_s(self.network, self.nvlink, transfer, num_bytes, group, nics, network_share)

    def link_of(self, group: GroupShape) -> LinkName:
        """The link that a group's transfers are on."""
        return "network" if group.crosses_nodes else "nvlink"

    def slow_down(self, link: LinkName) -> float:
        """Factor >= 1 on compute while a transfer runs on `link` beside it."""
        return float(getattr(self.overlap, f"compute_{link}", 1.0))

    def transfer_slow_down(self, link: LinkName) -> float:
        """Factor >= 1 on a transfer on `link` while compute runs beside it."""
        return float(getattr(self.overlap, f"transfer_{link}", 1.0))
