"""What effects of a large cluster do to the prices of a step, as four numbers that compose.

The models of this folder (ECMP conflicts, congestion, stragglers, launch skew) each make an
`Effects`; `combine` puts several together. `pricing.price` multiplies bandwidths by
`network_share`, times of computing by `compute_factor`, and adds the seconds once a step.
`NO_EFFECTS` changes nothing, which is the default: an ideal cluster.

Why factors here, where no constant may stand for a technique: these are not techniques of the
program but randomness of the machine, and each comes from a model with a seed and an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from megascale.errors import ConfigError
from megascale.plan.work.operations import Axis


@dataclass(frozen=True)
class NetworkShare:
    """Share of the network's bandwidth that a group of each axis gets, in (0, 1].

    Only transfers between nodes are meant: links inside a node have no switches to collide in.
    """

    tensor: float = 1.0
    data: float = 1.0
    pipeline: float = 1.0

    def __post_init__(self) -> None:
        for axis in ("tensor", "data", "pipeline"):
            share = getattr(self, axis)
            if not (math.isfinite(share) and 0.0 < share <= 1.0):
                raise ConfigError(
                    f"network share of axis {axis} is {share}; legal is more than 0 and at most 1, "
                    f"where 1 means that the axis has its links to itself"
                )

    def of(self, axis: Axis) -> float:
        """The share of an axis; tied embeddings cross from last to first stage as a pipeline."""
        return {
            "tensor": self.tensor,
            "data": self.data,
            "pipeline": self.pipeline,
            "embedding": self.pipeline,
        }[axis]

    def times(self, other: NetworkShare) -> NetworkShare:
        return NetworkShare(
            self.tensor * other.tensor, self.data * other.data, self.pipeline * other.pipeline
        )


@dataclass(frozen=True)
class Effects:
    """What a step pays beyond its own work.

    network_share   multiplier of the bandwidth between nodes, by axis
    compute_factor  of all computing time, at least 1: the step waits for its slowest node
    launch_skew_s   late start of the last rank into a step's data-parallel collectives
    fixed_s         per step whatever the layout (a fitted constant, 0 where nothing was fitted)
    """

    network_share: NetworkShare = field(default_factory=NetworkShare)
    compute_factor: float = 1.0
    launch_skew_s: float = 0.0
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.compute_factor) and self.compute_factor >= 1.0):
            raise ConfigError(
                f"compute_factor is {self.compute_factor}; legal is 1 (no node is slow) or more"
            )
        for name in ("launch_skew_s", "fixed_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ConfigError(f"{name} is {seconds}; legal is 0 seconds or more")


NO_EFFECTS = Effects()


def combine(effects: Iterable[Effects]) -> Effects:
    """All of `effects` at once: factors multiply, seconds add. Of none: `NO_EFFECTS`."""
    result = NO_EFFECTS
    for effect in effects:
        result = Effects(
            network_share=result.network_share.times(effect.network_share),
            compute_factor=result.compute_factor * effect.compute_factor,
            launch_skew_s=result.launch_skew_s + effect.launch_skew_s,
            fixed_s=result.fixed_s + effect.fixed_s,
        )
    return result
