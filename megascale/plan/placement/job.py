"""What a launcher has to know to place a job: its degrees, its bytes, and the network's shape.

Plain data: the driver keeps it with the job's policy in its journal. Under `megascale run` hosts
are known only when their agents have introduced themselves, so that the order is made then; a host
that the file does not have is placed as if alone on a switch, and told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megascale.config import RunConfig
from megascale.errors import ConfigError
from megascale.plan.case import case_of
from megascale.plan.effects.crossing import RingAxis, axis_bytes
from megascale.plan.placement.rank_map import DATA_FIRST, RankMap, rank_map
from megascale.plan.placement.topology import Switch, Topology, load_topology, topology_of
from megascale.topology import Mesh


@dataclass(frozen=True)
class JobPlacement:
    """How a job's ranks are to lie on hosts.

    topology  of the file that was given; None: what the scheduler says of each host's switch
    """

    procs_per_node: int
    tensor: int
    pipeline: int = 1
    num_bytes: Mapping[RingAxis, float] = field(default_factory=lambda: dict(DATA_FIRST))
    topology: Topology | None = None

    def mesh(self, num_nodes: int) -> Mesh | None:
        """Of so many nodes; None where the degrees do not fill them."""
        data, rest = divmod(num_nodes * self.procs_per_node, self.tensor * self.pipeline)
        return None if rest or not data else Mesh(self.tensor, data, self.pipeline)

    def switches(self, switch_of: Mapping[str, str | None]) -> dict[str, str | None]:
        """Host -> switch: the file's, else the scheduler's (`switch_of`)."""
        known = {} if self.topology is None else self.topology.switch_of
        return {host: known.get(host, switch) for host, switch in switch_of.items()}

    def unknown(self, hosts: Sequence[str]) -> list[str]:
        """Hosts that the topology file does not have."""
        if self.topology is None:
            return []
        known = self.topology.switch_of
        return [host for host in hosts if host not in known]

    def order(self, num_nodes: int, switch_of: Mapping[str, str | None]) -> RankMap | None:
        """The order of `num_nodes` of the hosts of `switch_of`; None where nothing is known of the
        network, or all of it hangs on one switch."""
        mesh, topology = self.mesh(num_nodes), self._topology(switch_of)
        if mesh is None or len({topology.switch_of[host] for host in switch_of}) < 2:
            return None
        return rank_map(
            topology,
            mesh,
            self.procs_per_node,
            nodes=list(switch_of),
            num_bytes=self.num_bytes,
        )

    def _topology(self, switch_of: Mapping[str, str | None]) -> Topology:
        if self.topology is None:
            return topology_of(switch_of)
        alone = [Switch(f"of {host} alone", (host,)) for host in self.unknown(list(switch_of))]
        file = self.topology
        return Topology(
            (*file.switches, *alone),
            file.rails,
            file.uplinks.num_links,
            file.nics_per_uplink,
            file.queue_pairs,
        )


def placement_of(config: RunConfig, num_nodes: int, procs_per_node: int) -> JobPlacement:
    """Of a run's configuration. Raises ConfigError for a bad file or one with too few nodes."""
    topology = topology_file(config.cluster.topology, num_nodes)
    case = case_of(config, num_nodes * procs_per_node)
    if case.job.model.vocab_size is None:  # of the data, which ranks read: the head is left out
        model = case.job.model.model_copy(update={"vocab_size": 0})
        case = replace(case, job=replace(case.job, model=model))
    layout = case.layout
    return JobPlacement(procs_per_node, layout.tensor, layout.pipeline, axis_bytes(case), topology)


def topology_file(path: str, num_nodes: int) -> Topology | None:
    """The topology that `cluster.topology` names; None for none."""
    if not path:
        return None
    topology = load_topology(path)
    if len(topology.nodes) < num_nodes:
        raise ConfigError(
            f"cluster.topology {path} has {len(topology.nodes)} nodes, the job needs {num_nodes}: "
            f"{num_nodes - len(topology.nodes)} missing; add them to the file"
        )
    return topology
