"""Effects of scale in a plan: conflicts in the network, slow nodes, late launches; from two nodes.

Inside one node there is no switch to collide in and nobody far away to wait for, and what we
measured there was measured with whatever jitter there is.
"""

from __future__ import annotations

from megascale.plan.case import Case
from megascale.plan.effects.compose import effect_parts, effects_of
from megascale.plan.machine.cluster import Cluster
from megascale.plan.search.find import EffectsOf, no_effects


def has_effects(cluster: Cluster) -> bool:
    """Whether any are counted."""
    return cluster.num_devices > cluster.devices_per_node


def effects_on(cluster: Cluster, *, ideal: bool = False) -> EffectsOf:
    """What a plan for `cluster` counts."""
    if ideal or not has_effects(cluster):
        return no_effects
    return lambda case: effects_of(case, cluster)


def effects_line(case: Case, cluster: Cluster, *, ideal: bool) -> str:
    """What a plan says of them."""
    if ideal:
        return "an ideal cluster: no conflicts in the network, no slow node, no late launch"
    if not has_effects(cluster):
        return "one node: no effects of scale"
    told = ", ".join(f"{part.name} {part.interval}" for part in effect_parts(case, cluster))
    return f"effects of scale: {told} (models with seed 0, not measured here)"
