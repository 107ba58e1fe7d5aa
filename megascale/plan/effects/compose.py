"""All effects of a cluster on a case, each by its switch, put together (MegaScale 3.6, 5, 6.3).

`effects_of` is what `price` takes; `effect_parts` the same one by one, with intervals, for people.
Congestion is not among them: rings meet no incast, and a dense model has no all-to-all;
`congestion.py` is for those who plan one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from megascale.errors import ConfigError
from megascale.plan.case import Case
from megascale.plan.effects import launch_skew as skew
from megascale.plan.effects import stragglers
from megascale.plan.effects.crossing import RING_AXES, RingAxis, axis_share, node_edges
from megascale.plan.effects.ecmp import Uplinks
from megascale.plan.effects.effects import Effects, NetworkShare, combine
from megascale.plan.effects.failures import RECOVERY, Recovery, RecoveryKind
from megascale.plan.effects.initialisation import creation_time, fitted_on_the_paper
from megascale.plan.effects.interval import Interval
from megascale.plan.effects.stragglers import PipelineDepth, Wavering
from megascale.plan.machine.cluster import Cluster
from megascale.topology import Mesh
from megascale.units import matmul_parameters

Placement = Literal["packed", "shuffled"]


@dataclass(frozen=True)
class EffectSwitches:
    """Which effects count, and what is done against them.

    placement           of ranks on nodes: "packed" fills one set of switches after the other,
                        "shuffled" takes nodes as they come
    evict_slow          slow nodes are found and replaced (`megascale run` does)
    planned_collection  all ranks collect garbage in the same steps (the trainer does)
    wavering            of ranks; its constants are of `stragglers.py`
    """

    ecmp: bool = True
    stragglers: bool = True
    launch_skew: bool = True
    placement: Placement = "packed"
    evict_slow: bool = True
    planned_collection: bool = True
    wavering: Wavering = field(default_factory=Wavering)

    def __post_init__(self) -> None:
        if self.placement not in ("packed", "shuffled"):
            raise ConfigError(f"placement {self.placement!r}; legal: packed, shuffled")


@dataclass(frozen=True)
class Part:
    """One effect: what it is, the figure it rests on, and what it does to prices."""

    name: str
    interval: Interval
    effects: Effects


def effects_of(
    case: Case, cluster: Cluster, *, seed: int = 0, switches: EffectSwitches = EffectSwitches()
) -> Effects:
    """What a cluster of this size does to the prices of this case. Raises ConfigError."""
    parts = effect_parts(case, cluster, seed=seed, switches=switches)
    return combine(part.effects for part in parts)


def effect_parts(
    case: Case, cluster: Cluster, *, seed: int = 0, switches: EffectSwitches = EffectSwitches()
) -> tuple[Part, ...]:
    """The effects of `effects_of`, one by one, with their 5th to 95th percentiles."""
    mesh, per_node = case.layout.mesh, cluster.devices_per_node
    parts: list[Part] = []
    if switches.ecmp and cluster.fabric is not None and mesh.world_size > per_node:
        parts += _conflicts(mesh, cluster, seed, switches.placement)
    if switches.stragglers:
        wavering = switches.wavering.evicted if switches.evict_slow else switches.wavering
        depth = PipelineDepth(case.micro_batches, case.layout.virtual)
        factor = _straggling(mesh, depth, per_node, wavering, seed)
        parts.append(Part("stragglers", factor, Effects(compute_factor=factor.value)))
    if switches.launch_skew and mesh.world_size > 1:
        late = skew.launch_skew(mesh.world_size, planned=switches.planned_collection)
        parts.append(Part("launch skew", late, Effects(launch_skew_s=late.value)))
    return tuple(parts)


_straggling = lru_cache(maxsize=1024)(
    lambda mesh, depth, per_node, wavering, seed: stragglers.simulate(
        mesh, depth, per_node, wavering, seed=seed
    )
)


def _conflicts(mesh: Mesh, cluster: Cluster, seed: int, placement: Placement) -> list[Part]:
    """ECMP on the way up from a node's switch, for every axis that leaves nodes."""
    uplinks, found = uplinks_of(cluster), []
    fabric, network = cluster.fabric, cluster.network
    assert fabric is not None, cluster.name
    assert network is not None, cluster.name
    nics_a_rail = max(1, network.nics_per_node // fabric.rails)
    sets = (fabric.servers_per_tor_set, fabric.rails, nics_a_rail)
    for axis in RING_AXES:
        if not len(node_edges(mesh, cluster.devices_per_node, axis)):
            continue
        share = _share(mesh, cluster.devices_per_node, axis, sets, uplinks, placement, seed)
        network_share = NetworkShare(**{axis: share.value})
        found.append(Part(f"conflicts, {axis}", share, Effects(network_share=network_share)))
    return found


@lru_cache(maxsize=4096)
def _share(
    mesh: Mesh,
    per_node: int,
    axis: RingAxis,
    sets: tuple[int, int, int],
    uplinks: Uplinks,
    placement: Placement,
    seed: int,
) -> Interval:
    """Nodes of a set, rails and NICs a rail are `sets`; a node's set by its place in the order."""
    nodes_a_set, rails, nics_a_rail = sets
    order = np.arange(-(-mesh.world_size // per_node)) // nodes_a_set
    if placement == "shuffled":
        order = np.random.default_rng(seed).permutation(order)
    return axis_share(
        mesh, per_node, axis, order, uplinks, rails=rails, nics_a_rail=nics_a_rail, seed=seed
    )


def uplinks_of(cluster: Cluster) -> Uplinks:
    """The uplinks of a switch of the cluster's fabric. Raises ConfigError where it has none."""
    if cluster.fabric is None or cluster.network is None:
        raise ConfigError(
            f"cluster {cluster.name!r} has no [fabric], so that nothing is known of its switches; "
            "add one, see catalogue/paper.toml, or leave conflicts out"
        )
    fabric, network = cluster.fabric, cluster.network
    return Uplinks(
        fabric.uplinks_per_tor,
        8.0 * fabric.switch_port_gb_s,
        8.0 * network.nic_gb_s,
        fabric.queue_pairs,
    )


def recovery_at_scale(
    case: Case, cluster: Cluster, kind: RecoveryKind, *, seconds_a_call: float | None = None
) -> Recovery:
    """The project's measured recovery from a fault of `kind`, with what grows with the job.

    seconds_a_call  of the store that groups meet at; None: of Redis, fitted on the paper
    Groups by ordered creation. State from a neighbour's memory, over a device's share of the NICs:
    its part of the parameters, and its shard of fp32 master weights and two moments. The paper's
    own figure is of its scale already and stays as it is.
    """
    found = RECOVERY[kind]
    if kind == "paper" or cluster.network is None:
        return found
    layout, call_s = case.layout, seconds_a_call or fitted_on_the_paper()["redis"]
    groups = creation_time(layout.mesh, "ordered", call_s)
    weights = matmul_parameters(case.job.model) / (layout.tensor * layout.pipeline)
    shards = layout.data if layout.zero_stage else 1
    num_bytes = weights * (case.job.dtype_bytes + 12.0 / shards)
    network = cluster.network
    share = network.nics_per_node / cluster.devices_per_node
    return found.at_scale(
        groups_s=groups.value, load_s=num_bytes / (network.nic_gb_s * 1e9 * share)
    )
