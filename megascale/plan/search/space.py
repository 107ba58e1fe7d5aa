"""Every legal layout of a job on a number of devices, as columns of numbers.

The rules are the trainer's (`config/parallelism.py`, `config/run.py`): tensor parallelism divides
heads, key-value heads, the MLP's width and a micro-batch's tokens; every chunk has a layer (layers
need not divide evenly: `stages.split_layers`); data parallelism times the micro-batch divides every
batch; a pipeline has at least as many micro-batches as stages, and whole groups of them where it is
interleaved. The tests load a random sample of every space as a `RunConfig`.

Left out, because another layout is at least as good in time and memory, whatever the prices:
gpipe (1F1B has its bubble and keeps less), interleaved schedules with one chunk a stage (1F1B keeps
less), zero-bubble schedules without a pipeline, ZeRO-2 without data parallelism.

In columns, because 300,000 layouts as objects would cost seconds before the first is priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from megascale.plan.case import Job, Layout, Recompute
from megascale.plan.columns import RECOMPUTES, SCHEDULE_NAMES
from megascale.plan.schedules.shared_head import MOST_STAGES

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_ONE_CHUNK = (0, 1)
_SEVERAL_CHUNKS = (2, 3)


@dataclass(frozen=True)
class Limits:
    """What the search looks at.

    max_tensor  most devices that share a layer; the trainer wants them in one node
    joins       micro-batches whose weight gradients are one GEMM
    """

    max_tensor: int = 8
    zero_stages: tuple[Literal[1, 2], ...] = (1, 2)
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    joins: tuple[int, ...] = (1, 2, 4)
    share_heads: tuple[bool, ...] = (False, True)


@dataclass(frozen=True)
class Space:
    """Layouts in columns of equal length.

    micro_batches  a pipeline runs so many a step
    recompute      an index of RECOMPUTES
    schedule       an index of SCHEDULE_NAMES
    """

    tensor: Integers
    pipeline: Integers
    virtual: Integers
    data: Integers
    micro_batch_size: Integers
    micro_batches: Integers
    zero_stage: Integers
    recompute: Integers
    schedule: Integers
    share_head: Flags
    join_weight_gradients: Integers

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, chosen: Integers | Flags) -> Space:
        """The layouts at these places, or where these flags are set."""
        return Space(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def layout(self, place: int) -> Layout:
        return Layout(
            tensor=int(self.tensor[place]),
            pipeline=int(self.pipeline[place]),
            virtual=int(self.virtual[place]),
            data=int(self.data[place]),
            micro_batch_size=int(self.micro_batch_size[place]),
            zero_stage=1 if self.zero_stage[place] == 1 else 2,
            recompute=RECOMPUTES[self.recompute[place]],
            schedule=SCHEDULE_NAMES[self.schedule[place]],
            share_head=bool(self.share_head[place]),
            join_weight_gradients=int(self.join_weight_gradients[place]),
        )

    def layouts(self) -> Iterator[Layout]:
        return (self.layout(place) for place in range(len(self)))


def legal_layouts(
    job: Job,
    num_devices: int,
    *,
    limits: Limits = Limits(),
    batch_sizes: tuple[int, ...] = (),
    transfers: str = "decoupled",
) -> Space:
    """All of them; empty where there are none (`nearest.py` then says why).

    batch_sizes  every size of a batch that ramps up; default: the job's own alone
    transfers    a shared head needs decoupled ones
    """
    batches = batch_sizes or (job.global_batch_size,)
    may_share = transfers == "decoupled" and not job.model.tie_embeddings
    found = [
        block
        for tensor, pipeline, data in degrees(job, num_devices, limits.max_tensor)
        for block in _blocks(job, (tensor, pipeline, data), batches, limits, may_share)
    ]
    columns = np.concatenate(found, axis=1) if found else np.zeros((11, 0), np.int64)
    return _space(columns)


def degrees(job: Job, num_devices: int, max_tensor: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, pipeline, data) that fill the devices; the batch has not been asked yet."""
    for tensor in tensor_sizes(job, max_tensor):
        if num_devices % tensor:
            continue
        rest = num_devices // tensor
        for pipeline in range(1, min(rest, job.model.num_layers) + 1):
            if rest % pipeline == 0:
                yield tensor, pipeline, rest // pipeline


def tensor_sizes(job: Job, max_tensor: int) -> list[int]:
    """Sizes that divide what tensor parallelism splits."""
    model = job.model
    split = (model.num_heads, model.kv_heads, model.ffn_size)
    return [t for t in range(1, max_tensor + 1) if all(width % t == 0 for width in split)]


def _blocks(
    job: Job,
    degree: tuple[int, int, int],
    batches: tuple[int, ...],
    limits: Limits,
    may_share: bool,
) -> Iterator[Integers]:
    """The columns of each micro-batch size and number of chunks, all switches of the rest."""
    tensor, pipeline, data = degree
    zero_stages = [stage for stage in limits.zero_stages if stage == 1 or data > 1]
    recomputes = [RECOMPUTES.index(name) for name in limits.recomputes]
    virtuals = range(1, job.model.num_layers // pipeline + 1 if pipeline > 1 else 2)
    for size in micro_batch_sizes(job, degree, batches):
        counts = [batch // (size * data) for batch in batches]
        joins = [join for join in limits.joins if join <= max(1, counts[-1])]
        in_groups = all(count % pipeline == 0 for count in counts)
        one = [v for v in virtuals if v == 1]
        several = [v for v in virtuals if v > 1 and in_groups]
        shares = [s for s in limits.share_heads if not s or (may_share and pipeline <= MOST_STAGES)]
        fixed = ([tensor], [pipeline], [data], [size], [counts[-1]], zero_stages, recomputes, joins)
        schedules = _ONE_CHUNK if pipeline > 1 else _ONE_CHUNK[:1]
        yield _product(*fixed, one, schedules, [False])
        yield _product(*fixed, several, _SEVERAL_CHUNKS, shares)


def micro_batch_sizes(
    job: Job, degree: tuple[int, int, int], batches: tuple[int, ...]
) -> list[int]:
    """Those that data parallelism leaves every batch whole with, and every pipeline filled."""
    tensor, pipeline, data = degree
    largest = min(batches) // (data * pipeline)
    return [
        size
        for size in range(1, largest + 1)
        if all(batch % (size * data) == 0 for batch in batches) and size * job.seq_len % tensor == 0
    ]


def _product(*choices: object) -> Integers:
    """All combinations, a column each."""
    grids = np.meshgrid(*(np.asarray(choice, np.int64) for choice in choices), indexing="ij")
    return np.stack([grid.ravel() for grid in grids])


def _space(columns: Integers) -> Space:
    tensor, pipeline, data, size, count, zero, recompute, join, virtual, schedule, share = columns
    return Space(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        data=data,
        micro_batch_size=size,
        micro_batches=count,
        zero_stage=zero,
        recompute=recompute,
        schedule=schedule,
        share_head=share.astype(np.bool_),
        join_weight_gradients=join,
    )
