"""Effects of scale in a plan: conflicts in the network, slow nodes, late launches; from two nodes.

Inside one node there is no switch to collide in and nobody far away to wait for, and what we
measured there was measured with whatever jitter there is.
"""

from __future__ import annotations

from megascale.plan.case import Case
from megascale.plan.effects.compose import EffectSwitches, Part, effect_parts, effects_of
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


def network_effects_on(cluster: Cluster, *, ideal: bool = False) -> EffectsOf:
    """Those of the network alone: they differ between layouts, and take no time to find out."""
    if ideal or not has_effects(cluster):
        return no_effects
    switches = EffectSwitches(stragglers=False, launch_skew=False)
    return lambda case: effects_of(case, cluster, switches=switches)


def effects_line(case: Case, cluster: Cluster, *, ideal: bool) -> str:
    """What a plan says of them."""
    if ideal:
        return "an ideal cluster: no conflicts in the network, no slow node, no late launch"
    if not has_effects(cluster):
        return "one node: no effects of scale"
    told = [line for part in effect_parts(case, cluster) if (line := _told(part))]
    if not told:
        return "effects of scale: none that counts"
    return f"effects of scale, by models with seed 0, not measured here: {'; '.join(told)}"


def _told(part: Part) -> str:
    """What a part does to prices; empty where it does nothing."""
    effects, words = part.effects, []
    for axis in ("tensor", "data", "pipeline"):
        share = getattr(effects.network_share, axis)
        if share < 1.0:
            words.append(f"{share:.2f} of the bandwidth on the {axis} axis")
    if effects.compute_factor > 1.0:
        words.append(f"computing x {effects.compute_factor:.3f}")
    if effects.launch_skew_s + effects.fixed_s > 0.0:
        words.append(f"{1e3 * (effects.launch_skew_s + effects.fixed_s):.0f} ms a step")
    name = part.name.split(",")[0]
    return f"{name} {', '.join(words)}" if words else ""
