"""Which nodes are silent, and for how long that may be held against them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megascale.cluster.job import OVER, JobState
from megascale.cluster.transitions import NodeSilent


def silent_nodes(
    job: JobState, silences_s: Mapping[str, float], *, readopting: bool = False
) -> list[NodeSilent]:
    """Nodes that are silent. When all of several are, it is rather the driver that is cut off:
    they are judged no further than suspicion, for as long as agents train on alone.

    silences_s  seconds since each node was heard, by the driver's clock
    readopting  agents still have to find a driver that came back: none is suspected for that, and
                lost is who is silent for as long as ever
    """
    cluster, nodes = job.policy.cluster, job.nodes.values()
    living = [node.name for node in nodes if node.state not in OVER and node.incarnation]
    least_s = cluster.lost_after_s if readopting else cluster.suspect_after_s
    silent = [name for name in living if silences_s.get(name, 0.0) >= least_s]
    cut_off = len(living) >= 3 and len(silent) == len(living)
    events = []
    for name in silent:
        silence_s = silences_s[name]
        if cut_off and silence_s < cluster.orphan_timeout_s:
            silence_s = min(silence_s, cluster.suspect_after_s)
        events.append(NodeSilent(name, silence_s))
    return events
