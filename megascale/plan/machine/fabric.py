"""The network's shape (MegaScale 3.6): switches, rails, split ports. Models of conflicts and of
congestion read it; the price of a transfer without them does not."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megascale.plan.machine.sourced import Sourced


class Fabric(Sourced):
    """Leaf switches (ToR) by rail: NIC i of each of a set's servers goes to ToR i of the set."""

    layers: int = Field(3, ge=1, le=4, description="of switches")
    servers_per_tor_set: int = Field(ge=1, description="nodes whose NICs meet the same ToR set")
    rails: int = Field(ge=1, description="ToR switches of a set")
    switch_ports: int = Field(ge=2)
    switch_port_gb_s: float = Field(
        gt=0.0, le=1_000.0, description="1e9 bytes a second of an unsplit port, one way"
    )
    down_port_split: int = Field(1, ge=1, description="NICs that share a ToR port (split cable)")
    uplinks_per_tor: int = Field(ge=1, description="unsplit ports of a ToR that lead upwards")
    oversubscription: float = Field(1.0, ge=1.0, description="down to up bandwidth of a ToR")
    congestion_control: Literal["dcqcn", "hybrid", "none"] = "dcqcn"
    queue_pairs: int = Field(1, ge=1, description="flows a pair of NICs spreads a transfer over")

    def check(self, nic_gb_s: float, nics_per_node: int) -> None:
        """Raises ValueError where ports do not fit the switches or the stated oversubscription."""
        if nics_per_node % self.rails:
            raise ValueError(
                f"fabric.rails {self.rails} does not divide network.nics_per_node "
                f"{nics_per_node}; nearest legal: {nics_per_node}"
            )
        nics = self.servers_per_tor_set * nics_per_node // self.rails
        down_ports = -(-nics // self.down_port_split)
        if down_ports + self.uplinks_per_tor > self.switch_ports:
            free = self.switch_ports - self.uplinks_per_tor
            servers = free * self.down_port_split * self.rails // nics_per_node
            raise ValueError(
                f"fabric.servers_per_tor_set {self.servers_per_tor_set} needs {down_ports} ports "
                f"of a ToR beside {self.uplinks_per_tor} uplinks, of {self.switch_ports}; nearest "
                f"legal: {max(1, servers)} servers, or fewer uplinks"
            )
        ratio = nics * nic_gb_s / (self.uplinks_per_tor * self.switch_port_gb_s)
        if abs(max(1.0, ratio) / self.oversubscription - 1.0) > 0.01:
            raise ValueError(
                f"fabric.oversubscription {self.oversubscription:g} contradicts its ports: "
                f"{nics} NICs of {nic_gb_s:g} GB/s under {self.uplinks_per_tor} uplinks of "
                f"{self.switch_port_gb_s:g}; nearest legal: {max(1.0, ratio):g}"
            )
