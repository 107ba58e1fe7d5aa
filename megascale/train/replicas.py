"""Are the parameters of data-parallel replicas still the same bits?

A digest is 64 bits: the wrapping sum of each 32- or 16-bit word times an odd weight of its place.
One pass over the parameters on the device; only the digests travel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import NumericalError
from megascale.telemetry.diagnose.replicas import differing_replicas
from megascale.telemetry.recorder import NullRecorder, Recorder
from megascale.train.assemble import Assembly

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_MOST_TOLD = 16  # buckets, ranks: an incident is a line of at most 2,000 characters to the agent
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


def check_replicas(
    assembly: Assembly,
    when: str,
    recorder: Recorder | None = None,
    step: int | None = None,
    agreed_step: int | None = None,
) -> None:
    """Raise NumericalError on all data ranks where a bucket's bits differ between them.

    Before it is raised each of them records the incident "replicas_differ" with its own digests of
    the buckets that differ, which the driver compares (`telemetry/diagnose/replicas.py`).

    agreed_step  the last step at which they were known to be equal: a run goes back there
    """
    group = assembly.groups.data
    if group is None:
        return
    assembly.zero.wait_for_parameters()
    digests = torch.stack([digest(bucket.parameters) for bucket in assembly.zero.buckets])
    low, high = digests.clone(), digests.clone()
    span = NullRecorder().span if recorder is None else recorder.span
    with span("replica_sums", op="all_reduce", group="data"):
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        different = (low != high).nonzero().flatten().tolist()
    if not different:
        return
    names = [assembly.zero.buckets[i].name for i in different]
    told = different[:_MOST_TOLD]
    by_rank = _of_all(digests[told], group)
    own = by_rank[dist.get_rank()]
    if recorder is not None:
        more = {} if agreed_step is None else {"agreed_step": agreed_step}
        hexed = {name: f"{value:016x}" for name, value in zip(names, own, strict=False)}
        recorder.incident("replicas_differ", step=step, digests=hexed, **more)
    raise NumericalError(
        f"{when}: parameters differ between data-parallel replicas in {_listed(names)}; "
        f"{_who(by_rank, names, step)}: restart from the last checkpoint, and test the machines"
    )


def _of_all(digests: Tensor, group: dist.ProcessGroup) -> dict[int, list[int]]:
    """The same of every global rank of `group`, as whole numbers from 0 to 2**64 - 1."""
    gathered = [torch.empty_like(digests) for _ in range(group.size())]
    dist.all_gather(gathered, digests, group=group)
    ranks = dist.get_process_group_ranks(group)
    return {
        rank: [value % 2**64 for value in one.tolist()]
        for rank, one in zip(ranks, gathered, strict=True)
    }


def _who(by_rank: dict[int, list[int]], names: list[str], step: int | None) -> str:
    hashes = {rank: dict(zip(names, one, strict=False)) for rank, one in by_rank.items()}
    found = differing_replicas(hashes, [tuple(by_rank)], step)
    if found is None or not found.certain:
        return f"none of {len(by_rank)} replicas has a majority, so one is corrupt, nobody knows it"
    odd = ", ".join(map(str, found.ranks[:_MOST_TOLD]))
    return f"rank {odd} holds other bits than most of {len(by_rank)} replicas and is corrupt"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_TOLD
    return ", ".join(names[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
