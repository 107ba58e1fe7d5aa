"""The optimizer's pass over a rank's shard (`optim/`), and the norm's small reductions.

Bytes an element of the shard, bf16 parameters, fp32 master, moments and gradients:

| | fused | plain |
|---|---|---|
| squares of the gradient | 4 | 4 |
| AdamW | 30: gradient 4, master 8, moments 16, parameter 2 | 8 scaling, 28, 6 rounding |
| LAMB | 28: gradient 8, master 4, moments 16; apply 14: master 8, update 4, parameter 2 | |

Plain LAMB: 8 scaling, 8 the update's copy, 28 Adam on it, 8 copied back, squares of both 8, 8 by
the trust ratio, 12 SGD, 6 rounding. Where parameters are their own masters there is no rounding.
"""

from __future__ import annotations

from megascale.plan.case import Case
from megascale.plan.work.operations import Collective, MemoryPass, Transfer, Work

_NORM_BYTES = 8  # a squared norm, fp64


def update_bytes_per_element(optimizer: str, *, plain: bool, dtype_bytes: int) -> float:
    """Read and written for one element of the shard, the gradient's norm included."""
    rounded = dtype_bytes < 4
    if optimizer == "adamw":
        return 4 + (8 + 28 + (6 if rounded else 0) if plain else 28 + (2 if rounded else 0))
    if plain:
        return 4 + 8 + 8 + 28 + 8 + 8 + 8 + 12 + (6 if rounded else 0)
    return 4 + 28 + 12 + (2 if rounded else 0)


def update_work(case: Case, elements: float, num_buckets: int, num_names: int) -> Work:
    """One update of a stage.

    elements     parameters of a tensor rank of the stage, before data ranks share them
    num_buckets  each is two runs of a shard: with and without weight decay
    num_names    logical parameters, whose squared norms are summed over ranks
    """
    layout, job = case.layout, case.job
    sharded = layout.data if layout.zero_stage > 0 else 1
    each = update_bytes_per_element(
        job.optimizer, plain=case.software.operators == "plain", dtype_bytes=job.dtype_bytes
    )
    passes = {("adamw", False): 2, ("lamb", False): 3, ("adamw", True): 4, ("lamb", True): 8}
    kernels = passes[job.optimizer, case.software.operators == "plain"] * 2 * num_buckets
    sums = 1 if job.optimizer == "adamw" else 2  # LAMB: of weights and updates too
    return (
        MemoryPass(job.optimizer, each * elements / sharded, kernels),
        *(
            Collective(f"norm.{axis}", Transfer.ALL_REDUCE, sums * _NORM_BYTES * num_names, axis)
            for axis in ("data", "tensor", "pipeline")
            if getattr(layout, axis) > 1 and (axis != "data" or sharded > 1)
        ),
    )
