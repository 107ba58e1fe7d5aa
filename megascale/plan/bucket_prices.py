"""Seconds of the data-parallel collectives of a stage, a bucket each (MegaScale 3.2; ZeRO).

| stage | gradients | parameters |
|---|---|---|
| 0 | all-reduce, once a step | none |
| 1 | reduce-scatter, once a step | all-gather, once a step |
| 2 | reduce-scatter, every micro-batch | all-gather, once a step |
| 3 | reduce-scatter, every micro-batch | all-gather, every forward and every backward |

Gradients in bf16 are an all-to-all and two passes over memory (`parallel/reduce_scatter.py`): cast
and sum, 12 bytes an element together.
"""

from __future__ import annotations

from megascale.plan.buckets import BucketSize, stage_buckets
from megascale.plan.case import Case
from megascale.plan.overlap import Pricer
from megascale.plan.parameters import layer_parameters
from megascale.plan.prices import DataPrices
from megascale.plan.work.operations import Collective, MemoryPass, Transfer

_CAST_AND_SUM_BYTES = 12


def data_prices(case: Case, pricer: Pricer, stage: int) -> DataPrices:
    """Of the ranks of a stage; empty without data parallelism."""
    if case.layout.data == 1:
        return DataPrices({}, {}, {})
    buckets = stage_buckets(case, stage)
    link = pricer.cluster.link_of(pricer.group("data"))
    return DataPrices(
        reduce_s={
            chunk: tuple(reduce_seconds(case, pricer, bucket) for bucket in reversed(held))
            for chunk, held in buckets.items()
        },
        gather_s={
            chunk: tuple(gather_seconds(case, pricer, bucket) for bucket in held)
            for chunk, held in buckets.items()
            if case.layout.zero_stage > 0
        },
        bucket_layers={
            chunk: tuple(float(bucket.layers) for bucket in reversed(held))
            for chunk, held in buckets.items()
        },
        slow_down=pricer.cluster.slow_down(link),
    )


def reduce_seconds(case: Case, pricer: Pricer, bucket: BucketSize) -> float:
    """One reduction of a bucket's gradients."""
    kind = Transfer.REDUCE_SCATTER if case.layout.zero_stage > 0 else Transfer.ALL_REDUCE
    each = case.software.grad_reduce_bytes
    seconds = pricer.transfer_s(Collective("reduce", kind, each * bucket.elements, "data"))
    if each < 4 and case.layout.zero_stage > 0:
        seconds += pricer.compute_s(MemoryPass("cast", _CAST_AND_SUM_BYTES * bucket.elements, 2))
    return seconds


def gather_seconds(case: Case, pricer: Pricer, bucket: BucketSize) -> float:
    """One gather of a bucket's parameters."""
    num_bytes = case.job.dtype_bytes * bucket.elements
    return pricer.transfer_s(Collective("gather", Transfer.ALL_GATHER, num_bytes, "data"))


def stage_names(case: Case, stage: int) -> int:
    """Logical parameters of a stage, about: those of its layers."""
    buckets = stage_buckets(case, stage)
    layers = sum(bucket.layers for held in buckets.values() for bucket in held)
    return layers * len(layer_parameters(case.job.model, 0))
