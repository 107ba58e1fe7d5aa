"""Links inside and between nodes, and the price of a collective on them.

A ring of n ranks moves (n-1)/n of S bytes over each link in n-1 steps, an all-reduce twice that:

    seconds = base + steps x step + moved bytes / (bandwidth x share)

Where a group crosses nodes with g members on each, NCCL lays g rings that leave a node through g
NICs: the network carries the ring's bytes at g NICs' speed, NVLink the same bytes inside, and the
slower of the two tells. Each nth step of the ring crosses the network and costs its step. An
all-reduce may go over a tree instead: 2 S bytes, and a number of steps that grows with log2(nodes).
"""

from __future__ import annotations

from math import ceil, log2
from typing import Literal

from pydantic import Field

from megascale.plan.machine.groups import GroupShape
from megascale.plan.machine.sourced import Sourced
from megascale.plan.work.operations import Transfer


class Link(Sourced):
    """Bandwidths are one way; the shares are what large transfers reach of it."""

    all_gather: float = Field(gt=0.0, le=1.0, description="share of the bandwidth reached")
    reduce_scatter: float = Field(gt=0.0, le=1.0, description="share of the bandwidth reached")
    all_reduce: float = Field(gt=0.0, le=1.0, description="share of the bandwidth reached")
    send: float = Field(gt=0.0, le=1.0, description="share of the bandwidth reached")
    base_s: float = Field(ge=0.0, le=1.0, description="of any transfer: launch, first bytes")
    step_s: float = Field(ge=0.0, le=1.0, description="of each step of a ring")

    def share_of(self, transfer: Transfer) -> float:
        return float(getattr(self, transfer.value))


class NodeLink(Link):
    """Between the devices of a node."""

    gb_s: float = Field(ge=1.0, le=20_000.0, description="1e9 bytes a second, one way, a device")
    copy_engine: float = Field(
        0.8, gt=0.0, le=1.0, description="share that copy engines reach, every device at once"
    )


class Network(Link):
    """Between nodes."""

    nic_gb_s: float = Field(ge=0.1, le=1_000.0, description="1e9 bytes a second, one way, a NIC")
    nics_per_node: int = Field(ge=1, le=64)
    tree: bool = Field(True, description="an all-reduce may go over a tree where that is faster")


class Fabric(Sourced):
    """The network's shape (MegaScale 3.6), for models of conflicts and congestion."""

    layers: int = Field(3, ge=1, le=4, description="of switches")
    servers_per_tor_set: int = Field(ge=1, description="nodes whose NICs meet the same ToR set")
    rails: int = Field(ge=1, description="ToR switches of a set; NIC i of a node goes to ToR i")
    switch_ports: int = Field(ge=2)
    switch_port_gb_s: float = Field(gt=0.0, description="1e9 bytes a second, one way")
    down_port_split: int = Field(1, ge=1, description="NICs that share a ToR port (split cable)")
    uplinks_per_tor: int = Field(ge=1)
    oversubscription: float = Field(1.0, ge=1.0, description="down to up bandwidth of a ToR")
    congestion_control: Literal["dcqcn", "hybrid", "none"] = "dcqcn"
    queue_pairs: int = Field(1, ge=1, description="flows a pair of NICs spreads a transfer over")


def moved_bytes(transfer: Transfer, num_bytes: float, ranks: int) -> float:
    """Bytes that leave a member, by a ring; a send moves all of them."""
    if transfer is Transfer.SEND:
        return num_bytes
    passes = 2 if transfer is Transfer.ALL_REDUCE else 1
    return passes * num_bytes * (ranks - 1) / ranks


def ring_steps(transfer: Transfer, ranks: int) -> int:
    if transfer is Transfer.SEND:
        return 0
    return (2 if transfer is Transfer.ALL_REDUCE else 1) * (ranks - 1)


def inside_s(link: NodeLink, transfer: Transfer, num_bytes: float, ranks: int) -> float:
    """Of a group inside a node."""
    bytes_per_s = link.gb_s * 1e9 * link.share_of(transfer)
    latency_s = link.base_s + ring_steps(transfer, ranks) * link.step_s
    return latency_s + moved_bytes(transfer, num_bytes, ranks) / bytes_per_s


def across_s(
    network: Network,
    node: NodeLink,
    transfer: Transfer,
    num_bytes: float,
    group: GroupShape,
    nics: float,
    network_share: float,
) -> float:
    """Of a group whose members have `nics` NICs on each of their nodes for themselves."""
    network_bytes_per_s = network.nic_gb_s * 1e9 * nics * network_share
    slowest = min(
        network_bytes_per_s * network.share_of(transfer),
        node.gb_s * 1e9 * node.share_of(transfer) if group.ranks_per_node > 1 else float("inf"),
    )
    steps = ring_steps(transfer, group.ranks)
    crossing = steps / group.ranks_per_node
    latency_s = network.base_s + crossing * network.step_s + (steps - crossing) * node.step_s
    ring_s = latency_s + moved_bytes(transfer, num_bytes, group.ranks) / slowest
    if transfer is not Transfer.ALL_REDUCE or not network.tree:
        return ring_s
    levels = ceil(log2(group.num_nodes))
    inner_steps = 2 * (group.ranks_per_node - 1)
    tree_latency_s = network.base_s + 2 * levels * network.step_s + inner_steps * node.step_s
    return min(ring_s, tree_latency_s + 2 * num_bytes / slowest)
