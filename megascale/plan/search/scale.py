"""Effects of scale in a plan: slow nodes, late launches, the cluster's own seconds; from two nodes.

Inside one node there is nobody far away to wait for, and what was measured there was measured with
whatever jitter there is. Conflicts in the network are counted where they are asked for: by
`effects/ecmp.py` the slowest flow of a step's many tells, which is worse than what the paper's
cluster did (`plan/validate/scale.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megascale.plan.case import Case
from megascale.plan.effects.compose import EffectSwitches, Part, effect_parts, effects_of
from megascale.plan.effects.effects import NO_EFFECTS, Effects
from megascale.plan.machine.cluster import Cluster


@dataclass(frozen=True)
class Scale:
    """What a plan counts.

    ideal      nothing
    conflicts  of hashes in the network too
    """

    ideal: bool = False
    conflicts: bool = False

    def of(self, case: Case, cluster: Cluster) -> Effects:
        """On the step of a case."""
        if self.counts_nothing(cluster):
            return NO_EFFECTS
        found = effects_of(case, cluster, switches=EffectSwitches(ecmp=self.conflicts))
        return replace(found, fixed_s=found.fixed_s + cluster.fixed_s)

    def of_network(self, case: Case, cluster: Cluster) -> Effects:
        """Those of them that tell layouts apart, and take no time to find out."""
        if not self.tells_apart(cluster):
            return NO_EFFECTS
        switches = EffectSwitches(stragglers=False, launch_skew=False)
        return effects_of(case, cluster, switches=switches)

    def tells_apart(self, cluster: Cluster) -> bool:
        """Whether the network's effects are counted: they differ between layouts."""
        return self.conflicts and not self.counts_nothing(cluster)

    def counts_nothing(self, cluster: Cluster) -> bool:
        return self.ideal or cluster.num_devices <= cluster.devices_per_node

    def told(self, case: Case, cluster: Cluster) -> str:
        """What a plan says of them."""
        if self.ideal:
            return "an ideal cluster: no conflicts in the network, no slow node, no late launch"
        if self.counts_nothing(cluster):
            return "one node: no effects of scale"
        parts = effect_parts(case, cluster, switches=EffectSwitches(ecmp=self.conflicts))
        words = [line for part in parts if (line := _told(part))]
        if cluster.fixed_s > 0.0:
            words.append(f"{cluster.fixed_s:g} s a step ({cluster.source_of('fixed_s')})")
        if not self.conflicts:
            words.append("no conflicts in the network (--conflicts)")
        return f"effects of scale, by models, not measured here: {'; '.join(words)}"


USUAL = Scale()
IDEAL = Scale(ideal=True)


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
