"""Which node runs which ranks. The driver owns the map: a spare takes the lost node's ranks.

Ranks are blocks: node rank r runs ranks r x procs to (r + 1) x procs - 1. A node that stays keeps
its node rank over restarts, so that what it holds in memory and what the other nodes know of it
stay true. Only a shrink moves ranks: to the holes below the new count.
"""

from __future__ import annotations

from collections import Counter

from megascale.cluster.actions import Place
from megascale.cluster.job import JobState, Node, natural


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


def place(job: JobState, count: int) -> tuple[Place, ...]:
    """`count` nodes on node ranks 0 to count - 1. There are at least so many usable ones."""
    nodes = sorted(usable(job), key=lambda node: natural(node.name))
    assert len(nodes) >= count, (len(nodes), count)
    taken: dict[int, str] = {}
    for node in nodes:
        if node.node_rank is not None and node.node_rank < count:
            assert node.node_rank not in taken, (node.node_rank, node.name, taken)
            taken[node.node_rank] = node.name
    free = [node for node in nodes if node.name not in taken.values()]
    switches = Counter(node.switch for node in nodes if node.name in taken.values())
    # who held ranks before comes first, then who hangs on the switch of most others
    free.sort(key=lambda node: (node.node_rank is None, -switches[node.switch], node.switch or ""))
    for node_rank in range(count):
        if node_rank not in taken:
            taken[node_rank] = free.pop(0).name
    return tuple(Place(name, node_rank) for node_rank, name in sorted(taken.items()))
