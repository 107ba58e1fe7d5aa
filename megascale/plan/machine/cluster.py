"""A cluster: device, node, network; and what an operation or a transfer costs on it.

Read from a TOML file (`load.py`). Every number says where it comes from (`sourced.py`). Prices are
pure functions of sizes, remembered; they grow with every size and are never below the roofline.
Effects of scale (conflicts, stragglers) are not here: `network_share` hands them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from megascale.plan.machine.device import Device
from megascale.plan.machine.fabric import Fabric
from megascale.plan.machine.groups import GroupShape
from megascale.plan.machine.links import Network, NodeLink
from megascale.plan.machine.sampled import SampledDevice
from megascale.plan.machine.samples import Samples
from megascale.plan.machine.sourced import Sourced
from megascale.plan.machine.transfers import SampledLinks
from megascale.plan.work.operations import Attention, Gemm, MemoryPass, Transfer

LinkName = Literal["nvlink", "network", "copy_engine"]


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
    """See the module. `num_devices` are used where nobody says how many; at most `most_devices`.

    Made by `load_cluster` or `changed`; `model_copy` would keep prices of the old numbers.
    """

    name: str
    notes: str = ""
    num_devices: int = Field(ge=1, le=1_000_000)
    most_devices: int | None = Field(None, ge=1, description="default: num_devices")
    devices_per_node: int = Field(ge=1, le=1_024)
    fixed_s: float = Field(
        0.0,
        ge=0.0,
        le=60.0,
        description="of every step of several nodes beside its work; a plan adds it",
    )
    device: Device
    nvlink: NodeLink
    network: Network | None = None
    fabric: Fabric | None = None
    overlap: Overlap
    samples: Samples | None = None

    @model_validator(mode="after")
    def _devices_fill_nodes(self) -> Self:
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
        return self

    @model_validator(mode="after")
    def _links_make_sense(self) -> Self:
        if self.network is None:
            return self
        if self.network.nic_gb_s > self.nvlink.gb_s:
            raise ValueError(
                f"network.nic_gb_s {self.network.nic_gb_s:g} is faster than nvlink.gb_s "
                f"{self.nvlink.gb_s:g} inside a node; are both in GB/s, one way? nearest legal: "
                f"network.nic_gb_s at most {self.nvlink.gb_s:g}"
            )
        if self.fabric is not None:
            self.fabric.check(self.network.nic_gb_s, self.network.nics_per_node)
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.num_devices, self.device.name))

    @property
    def limit(self) -> int:
        """The largest number of devices that can be asked for."""
        return self.most_devices if self.most_devices is not None else self.num_devices

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)

    @cached_property
    def _device_prices(self) -> SampledDevice:
        return SampledDevice(self.device, self.samples)

    @cached_property
    def _link_prices(self) -> SampledLinks:
        samples = self.samples.collective if self.samples is not None else ()
        return SampledLinks(self.nvlink, self.network, self.devices_per_node, samples)

    @cached_property
    def _remembered(self) -> dict[Any, float]:
        return {}

    def seconds(self, operation: Gemm | Attention | MemoryPass) -> float:
        """Seconds of the device for `operation`, the gap between two kernels included."""
        found = self._remembered.get(operation)
        if found is None:
            found = self._device_prices.seconds(operation)
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
            found = self._transfer_s(*key)
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
        if group.crosses_nodes:
            assert not copy_engine, f"copy engines do not cross nodes: {group}"
            return self._link_prices.across_s(transfer, num_bytes, group, network_share)
        if copy_engine:
            return self._link_prices.copied_s(transfer, num_bytes, group.ranks)
        return self._link_prices.inside_s(transfer, num_bytes, group.ranks)

    def link_of(self, group: GroupShape) -> LinkName:
        """The link that a group's transfers by NCCL are on."""
        return "network" if group.crosses_nodes else "nvlink"

    def slow_down(self, link: LinkName) -> float:
        """Factor >= 1 on compute while a transfer runs on `link` beside it."""
        return float(getattr(self.overlap, f"compute_{link}"))

    def transfer_slow_down(self, link: LinkName) -> float:
        """Factor >= 1 on a transfer on `link` while compute runs beside it."""
        return float(getattr(self.overlap, f"transfer_{link}"))

    def changed(self, values: Mapping[str, Any]) -> Cluster:
        """Another cluster with some values changed, by their path: "device.gemm.share": 0.9."""
        tables = self.model_dump(exclude_unset=True, mode="json")
        for path, value in values.items():
            *sections, key = path.split(".")
            table = tables
            for section in sections:
                table = table[section]
            table[key] = value
        return Cluster.model_validate(tables)
