"""Which node runs which ranks. The driver owns the map: a spare takes the lost node's ranks.

Ranks are blocks: node rank r runs ranks r x procs to (r + 1) x procs - 1. A node that stays keeps
its node rank over restarts, so that what it holds in memory and what the other nodes know of it
stay true. Only a shrink moves ranks: to the holes below the new count.
"""

from __future__ import annotations

from collections import Counter

from megascale.cluster.actions import Place
from megascale.cluster.job import JobState, Node, natural
from megascale.plan.placement.rank_map import RankMap


def usable(job: JobState) -> list[Node]:
    """Nodes that could run ranks now."""
    return [node for node in job.in_state("active", "spare") if node.incarnation]


def coming(job: JobState) -> int:
    """Nodes that will be usable, or fail their check."""
    return len(job.in_state("joining", "checking")) + job.wanted


def legal_count(job: JobState, available: int) -> int | None:
    """Most nodes, of those that the layout allows, that `available` can fill."""
    legal = (*job.policy.legal_nodes, job.policy.num_nodes)
    fitting = [n for n in legal if n <= min(available, job.policy.num_nodes)]
    return max(fitting, default=None)


def by_network(job: JobState, count: int) -> RankMap | None:
    """The order of hosts that a job begins with, where the network's shape is known.

    None where it is not, and once nodes hold ranks: a node that stays keeps them.
    """
    placement = job.policy.placement
    nodes = sorted(usable(job), key=lambda node: natural(node.name))
    on_host = {node.host: node for node in nodes}
    began = any(node.node_rank is not None for node in nodes)
    if placement is None or began or len(on_host) < len(nodes):
        return None
    return placement.order(count, {host: node.switch for host, node in on_host.items()})


def place(job: JobState, count: int, network: RankMap | None = None) -> tuple[Place, ...]:
    """`count` nodes on node ranks 0 to count - 1. There are at least so many usable ones.

    network  of `by_network`
    """
    nodes = sorted(usable(job), key=lambda node: natural(node.name))
    assert len(nodes) >= count, (len(nodes), count)
    taken: dict[int, Node] = {}
    if network is not None:
        on_host = {node.host: node for node in nodes}
        taken = {node_rank: on_host[host] for node_rank, host in enumerate(network.order)}
    for node in nodes:
        if node.node_rank is not None and node.node_rank < count:
            assert node.node_rank not in taken, (node.node_rank, node.name, taken)
            taken[node.node_rank] = node
    _fill(job, nodes, taken, count)
    return tuple(Place(node.name, node_rank) for node_rank, node in sorted(taken.items()))


def _fill(job: JobState, nodes: list[Node], taken: dict[int, Node], count: int) -> None:
    """Put free nodes on the node ranks that nobody holds.

    Who held ranks before comes first, then who hangs on the switch of the rank's neighbours, then
    on that of most others.
    """
    placed = {node.name for node in taken.values()}
    free = [node for node in nodes if node.name not in placed]
    switch_of: dict[str, str | None] = {node.host: node.switch for node in nodes}
    if job.policy.placement is not None:
        switch_of = job.policy.placement.switches(switch_of)
    common = Counter(switch_of[node.host] for node in taken.values())

    def preferred(node: Node) -> tuple[bool, int, str]:
        switch = switch_of[node.host]
        return node.node_rank is None, -common[switch], switch or ""

    free.sort(key=preferred)
    for node_rank in [r for r in range(count) if r not in taken]:
        beside = {switch_of[taken[r].host] for r in (node_rank - 1, node_rank + 1) if r in taken}
        near = (node for node in free if switch_of[node.host] in beside - {None})
        chosen = free[0] if free[0].node_rank is not None else next(near, free[0])
        free.remove(chosen)
        taken[node_rank] = chosen
