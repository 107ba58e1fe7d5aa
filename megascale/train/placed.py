"""Which ranks this machine runs, by the network's shape (`cluster.topology`; MegaScale 3.6).

A launcher numbers ranks by machines as it finds them. Where a topology file says how they hang on
switches, each rank renumbers itself by the same pure function of the file, the list of the job's
machines and the configuration: nobody has to be asked, and all agree. Under `megascale run` the
driver has placed the ranks, and nothing is done here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from megascale.config import RunConfig
from megascale.env import NodeEnvironment, RankEnvironment, agent_environment, node_environment
from megascale.errors import ConfigError
from megascale.plan.placement.hosts import expand
from megascale.plan.placement.job import JobPlacement, placement_of, topology_file
from megascale.plan.placement.rank_map import rank_map
from megascale.plan.placement.topology import Topology

logger = logging.getLogger(__name__)


def placed(
    config: RunConfig,
    rank: RankEnvironment,
    *,
    layout_is_open: bool = False,
    node: NodeEnvironment | None = None,
) -> RankEnvironment:
    """`rank` with the number that its machine's place in the network gives it.

    layout_is_open  the degrees are chosen when ranks have met: machines are put in a ring
    Raises ConfigError where the file does not fit the job's machines.
    """
    if (
        not config.cluster.topology
        or rank.local_world_size == rank.world_size
        or agent_environment().progress_page is not None
    ):
        return rank
    node = node_environment() if node is None else node
    per_node = rank.local_world_size
    num_nodes, rest = divmod(rank.world_size, per_node)
    if rest:
        raise ConfigError(
            f"cluster.topology: {rank.world_size} ranks with {per_node} on this machine; legal is "
            "the same number on every machine"
        )
    if layout_is_open:
        topology = topology_file(config.cluster.topology, num_nodes)
        placement = JobPlacement(per_node, tensor=per_node, topology=topology)
    else:
        placement = placement_of(config, num_nodes, per_node)
    return _renumbered(placement, rank, node, num_nodes, config.cluster.topology)


def preview(config: RunConfig, world_size: int) -> str:
    """What placing by `cluster.topology` would gain, for a dry run; empty without a file."""
    topology = topology_file(config.cluster.topology, 1)
    if topology is None:
        return ""
    num_nodes = len(topology.nodes)
    per_node, rest = divmod(world_size, num_nodes)
    if rest or not per_node:
        raise ConfigError(
            f"{world_size} ranks are not the same number on each of the {num_nodes} nodes of "
            f"{config.cluster.topology}; give a multiple of {num_nodes}, or a file with the job's "
            "nodes alone"
        )
    placement = placement_of(config, num_nodes, per_node)
    mesh = placement.mesh(num_nodes)
    assert mesh is not None, (world_size, placement)
    found = rank_map(topology, mesh, per_node, num_bytes=placement.num_bytes)
    head = f"ranks on {num_nodes} nodes of {per_node}, by {config.cluster.topology} (simulated):"
    return f"{head}\n{found}"


def _renumbered(
    placement: JobPlacement,
    rank: RankEnvironment,
    node: NodeEnvironment,
    num_nodes: int,
    file: str,
) -> RankEnvironment:
    topology, mesh = placement.topology, placement.mesh(num_nodes)
    assert topology is not None, file
    assert mesh is not None, (placement, num_nodes)
    nodes = _machines(topology, node, num_nodes, file)
    first = None if node.free_rank_zero else _named(rank.master_addr or "", nodes)
    if first is None and not node.free_rank_zero:
        raise ConfigError(
            f"MASTER_ADDR is {rank.master_addr}, which is none of the job's machines in {file}; "
            "set it to the name of one of them: rank 0 is placed there"
        )
    found = rank_map(
        topology,
        mesh,
        placement.procs_per_node,
        nodes=nodes,
        num_bytes=placement.num_bytes,
        first=first,
    )
    here = _named(node.name, found.order)
    if here is None:
        raise ConfigError(
            f"this machine is {node.name}, which is not in {file}; add it there by this name"
        )
    number = found.order.index(here) * rank.local_world_size + rank.local_rank
    if number == 0:
        logger.info("ranks by the network's shape (simulated):\n%s", found)
    return replace(rank, global_rank=number)


def _machines(topology: Topology, node: NodeEnvironment, num_nodes: int, file: str) -> list[str]:
    """The job's machines by their names in the file."""
    if node.job_nodes is None:
        if len(topology.nodes) != num_nodes:
            raise ConfigError(
                f"{file} has {len(topology.nodes)} nodes and the job {num_nodes}; without Slurm's "
                "list of them the file must have the job's machines and no others"
            )
        return topology.nodes
    names = expand(node.job_nodes)
    known = [_named(name, topology.nodes) or name for name in names]
    if len(known) != num_nodes:
        raise ConfigError(
            f"Slurm's step has {len(known)} machines ({node.job_nodes}), the job {num_nodes}; "
            "start as many ranks on each of them"
        )
    return known


def _named(name: str, names: Sequence[str]) -> str | None:
    """`name` as it is in `names`: as it stands, or without its domain."""
    if name in names:
        return name
    short = {other.partition(".")[0]: other for other in names}
    return short.get(name.partition(".")[0])
