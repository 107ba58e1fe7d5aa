"""Links inside and between nodes, and the price of a transfer on them without samples.

A ring of n ranks moves (n-1)/n of S bytes over each link in n-1 steps, an all-reduce twice that:

    seconds = base + steps x step + moved bytes / (bandwidth x share)

Where a group crosses nodes with g members on each, NCCL lays g rings that leave a node through g
NICs: the network carries the ring's bytes at g NICs' speed, NVLink the same bytes inside, and the
slower of the two tells. Each gth step of a ring crosses the network and costs its step. An
all-reduce may go over a tree instead: 2 S bytes, and a number of steps that grows with log2(nodes).
"""

from __future__ import annotations

from math import ceil, inf, log2

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
        """What `transfer` reaches of the bandwidth."""
        return float(getattr(self, transfer.value))


class NodeLink(Link):
    """Between the devices of a node."""

    gb_s: float = Field(ge=0.1, le=20_000.0, description="1e9 bytes a second, one way, a device")
    copy_engine: float = Field(
        0.8, gt=0.0, le=1.0, description="share that copy engines reach, every device at once"
    )

    def bytes_per_s(self, transfer: Transfer) -> float:
        """Reached by a large transfer."""
        return self.gb_s * 1e9 * self.share_of(transfer)


class Network(Link):
    """Between nodes."""

    nic_gb_s: float = Field(ge=0.05, le=1_000.0, description="1e9 bytes a second, one way, a NIC")
    nics_per_node: int = Field(ge=1, le=64)
    tree: bool = Field(True, description="an all-reduce may go over a tree where that is faster")


def moved_bytes(transfer: Transfer, num_bytes: float, ranks: int) -> float:
    """Bytes that leave a member, by a ring; a send moves all of them."""
    if transfer is Transfer.SEND:
        return num_bytes
    passes = 2 if transfer is Transfer.ALL_REDUCE else 1
    return passes * num_bytes * (ranks - 1) / ranks


def ring_steps(transfer: Transfer, ranks: int) -> int:
    """Steps one after the other; a send has none but its base."""
    if transfer is Transfer.SEND:
        return 0
    return (2 if transfer is Transfer.ALL_REDUCE else 1) * (ranks - 1)


def latency_s(link: Link, transfer: Transfer, ranks: int) -> float:
    """Of a transfer without bytes, inside one link."""
    return link.base_s + ring_steps(transfer, ranks) * link.step_s


def inside_s(link: NodeLink, transfer: Transfer, num_bytes: float, ranks: int) -> float:
    """Of a group inside a node."""
    moved = moved_bytes(transfer, num_bytes, ranks)
    return latency_s(link, transfer, ranks) + moved / link.bytes_per_s(transfer)


def across_s(
    network: Network,
    node: NodeLink,
    transfer: Transfer,
    num_bytes: float,
    group: GroupShape,
    nics_bytes_per_s: float,
) -> float:
    """Of a group whose members on a node have NICs of `nics_bytes_per_s` for themselves."""
    slowest = min(
        nics_bytes_per_s * network.share_of(transfer),
        node.bytes_per_s(transfer) if group.ranks_per_node > 1 else inf,
    )
    steps = ring_steps(transfer, group.ranks)
    crossing = steps / group.ranks_per_node
    step_s = crossing * network.step_s + (steps - crossing) * node.step_s
    moved = moved_bytes(transfer, num_bytes, group.ranks)
    ring_s = network.base_s + step_s + moved / slowest
    if transfer is not Transfer.ALL_REDUCE or not network.tree:
        return ring_s
    levels = ceil(log2(group.num_nodes))
    inner_s = 2 * (group.ranks_per_node - 1) * node.step_s
    tree_s = network.base_s + 2 * levels * network.step_s + inner_s + 2 * num_bytes / slowest
    return min(ring_s, tree_s)
