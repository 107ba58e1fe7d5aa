"""What the paper's cluster does to a step beside its work, for the rows of MegaScale (5.1, 6.3).

Three things, of which one is fitted:

slow nodes   0.5 % of machines take 10 % longer, as printed; the rows of Table 2 are taken as they
             would be before such machines were found, so that a step feels all of it. Not fitted
late ranks   garbage collected when each rank likes, in a host that does not run ahead, or by all
             ranks in the same steps: `effects/launch_skew.py` with its own constants. Not fitted
fixed_s      seconds a step, the same for both systems: FITTED by least squares of the relative
             errors of Table 2's eight Megatron-LM rows, on nothing else

Conflicts of hashes are not among them: the paper tuned its network for both systems, and with
`effects/ecmp.py`'s slowest flow the baseline's rows fit worse, not better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megascale.plan.case import Case
from megascale.plan.effects.effects import NO_EFFECTS, Effects
from megascale.plan.effects.launch_skew import launch_skew
from megascale.plan.effects.stragglers import PipelineDepth, Wavering, approximate
from megascale.plan.estimate import estimate
from megascale.plan.machine.cluster import Cluster
from megascale.plan.pricing import price
from megascale.plan.validate.rows import Row

SLOW_NODES = Wavering(exposed=1.0, chip_sd=0.0, step_sd=0.0)


def scale_effects(case: Case, cluster: Cluster, fixed_s: float = 0.0) -> Effects:
    """Slow nodes, late ranks, and `fixed_s` a step."""
    mesh, layout = case.layout.mesh, case.layout
    depth = PipelineDepth(case.micro_batches, layout.virtual)
    late = launch_skew(mesh.world_size, planned=case.software.host_ahead)
    return Effects(
        compute_factor=max(1.0, approximate(mesh, depth, cluster.devices_per_node, SLOW_NODES)),
        launch_skew_s=late.value,
        fixed_s=fixed_s,
    )


def with_scale(rows: Sequence[Row], fixed_s: float) -> list[Row]:
    """The rows of the paper's cluster with its effects."""
    return [replace(row, effects=scale_effects(row.case, row.cluster, fixed_s)) for row in rows]


def predict_s(row: Row) -> float:
    """Seconds of the row's step by closed form."""
    prices = price(row.case, row.cluster, row.effects)
    return estimate(row.case, prices, row.cluster.device.peak_tflops).step_s


def fit_fixed_s(rows: Sequence[Row]) -> float:
    """The seconds a step with which the relative errors of `rows` have the least squares; at
    least 0."""
    if not rows:
        return NO_EFFECTS.fixed_s
    weights = [1.0 / row.measured_s for row in rows]
    errors = [predict_s(row) / row.measured_s - 1.0 for row in with_scale(rows, 0.0)]
    best = -sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(w * w for w in weights)
    return max(0.0, best)
