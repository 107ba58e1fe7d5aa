"""Are the parameters of data-parallel replicas still the same bits?

A digest is 64 bits: the wrapping sum of each 32- or 16-bit word times an odd weight of its place.
One pass over the parameters on the device; only the digests travel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import NumericalError
from megascale.train.assemble import Assembly

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_SLICE = 1 << 24  # elements: bounds the int64 temporaries


def digest(values: Tensor) -> Tensor:
    """int64 scalar on the device of the 1-D tensor `values`."""
    words = values.view(_WORDS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, words.numel(), _SLICE):
        part = words[start : start + _SLICE].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=values.device)
        total += (part * (2 * place + 1)).sum()
    return total


def check_replicas(assembly: Assembly, when: str) -> None:
    """Raise NumericalError on all data ranks where a bucket's bits differ between them."""
    group = assembly.groups.data
    if group is None:
        return
    assembly.zero.wait_for_parameters()
    digests = torch.stack([digest(bucket.parameters) for bucket in assembly.zero.buckets])
    low, high = digests.clone(), digests
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    different = (low != high).nonzero().flatten().tolist()
    if different:
        names = [assembly.zero.buckets[i].name for i in different]
        raise NumericalError(
            f"{when}: parameters differ between data-parallel replicas in {', '.join(names)}; "
            "a replica is corrupt: restart from the last checkpoint, and test the machines"
        )
