"""A measured training step, and what is compared with it. Plain data, one form for all sources.

`measured_s` is the only thing that errors are told of. Where a paper prints utilisation alone the
seconds follow from its own formula (MegaScale 6.1): 72 B s l h^2 (1 + s/6h + V/12lh) FLOPs over
seconds, devices and peak, attention in full, a sliding window's pairs deducted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megascale.plan.case import Case, Job
from megascale.plan.effects.effects import NO_EFFECTS, Effects
from megascale.plan.machine.cluster import Cluster
from megascale.units import flops_per_token, mfu


@dataclass(frozen=True)
class Row:
    """One measured step.

    set       where it stands: table2, table3, fig9, korthikanti, narayanan, vtrain, mosaicml, ...
    label     what distinguishes it within its set and system
    fitted    whether a number of a cluster file, or a constant, was chosen with this row in view
    effects   of the cluster it ran on; none where it is small
    memory_gb peak of the fullest device as the source counts it; None: not told
    """

    set: str
    system: str
    model: str
    label: str
    case: Case
    cluster: Cluster
    measured_s: float
    source: str
    fitted: bool = False
    effects: Effects = NO_EFFECTS
    memory_gb: float | None = None

    @property
    def gpus(self) -> int:
        return self.case.layout.num_devices

    def mfu_of(self, step_s: float) -> float:
        """Utilisation of a step of `step_s` on this row's device, by the formula above."""
        job = self.case.job
        return mfu(
            job.tokens_per_step / step_s, _flops(job), self.gpus, self.cluster.device.peak_tflops
        )


def seconds_of_mfu(job: Job, num_devices: int, share: float, peak_tflops: float) -> float:
    """Seconds of a step whose printed utilisation is `share`, by the formula above."""
    return job.tokens_per_step * _flops(job) / (num_devices * peak_tflops * 1e12 * share)


@lru_cache(maxsize=1024)
def _flops(job: Job) -> float:
    return flops_per_token(job.model, job.seq_len)
