"""Flat storage of parameters and gradients, a bucket at a time (MegaScale 3.2: the model chunk).

A bucket is one run of memory for the parameters of k layers and another for their main gradients.
Data rank r owns elements [r n, (r + 1) n) of every bucket: one reduce-scatter and one all-gather a
bucket, in place, with no copies in or out. Where a logical parameter lies is a list of `FlatBlock`s
(offset in the bucket, `Block`); what a rank owns of it is the part inside its range.

Order inside a bucket: matrices sharded by tensor parallelism, replicated matrices, replicated
vectors, sharded vectors. So weight decay (matrices) and the sum over the tensor group (replicated)
each concern one contiguous run. Parameters start at multiples of ALIGNMENT elements; the gaps and
the padding of the vocabulary hold zeros, get zero gradients, and stay zero under every optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from megascale.ops.main_gradient import mark_stale, take_stale
from megascale.parallel.tensor import StoredParameter
from megascale.shards import Block

ALIGNMENT = 64  # elements: 128 bytes of bf16, what tensor-core kernels like
FIRST_BUCKET_SHARE = 1 / 8  # of `bucket_bytes`, for the first bucket of a chunk


@dataclass(frozen=True)
class FlatBlock:
    """A logical block inside a bucket: elements [start, stop), padding up to the next included."""

    block: Block
    start: int  # first element of the block's data in the bucket
    stop: int  # where the next flat block begins

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices, never to vectors."""
        return len(self.block.global_shape) > 1


@dataclass(frozen=True)
class OwnedBlock:
    """The part of a flat block inside this rank's range: shard elements [start, stop)."""

    flat: FlatBlock
    start: int
    stop: int


def one_run(pieces: Sequence[OwnedBlock]) -> tuple[int, int]:
    """First and last + 1 shard element of pieces that must lie next to each other."""
    first, last = pieces[0].start, pieces[-1].stop
    assert last - first == sum(p.stop - p.start for p in pieces), f"not one run: {pieces}"
    return first, last


@dataclass(eq=False)
class Bucket:
    """Parameters that are communicated together; `units` are consecutive units of one chunk."""

    name: str
    chunk: int
    first_unit: int
    last_unit: int
    stored: list[StoredParameter]
    num_data_ranks: int
    data_rank: int
    flat_blocks: list[FlatBlock] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of each stored parameter
    num_elements: int = 0
    parameters: Tensor = field(init=False)  # [num_elements], compute dtype
    master: Tensor = field(init=False)  # [shard], main dtype: this rank's range
    gradient: Tensor = field(init=False)  # [shard], main dtype: reduced gradient of the range

    def __post_init__(self) -> None:
        self.stored.sort(key=_storage_order)
        position = 0
        for stored in self.stored:
            position = _aligned(position)
            self.offsets.append(position)
            for block in stored.blocks:
                self.flat_blocks.append(FlatBlock(block, position + block.start, 0))
            position += prod(stored.parameter.shape)
        unit = self.num_data_ranks * ALIGNMENT
        self.num_elements = (position + unit - 1) // unit * unit
        ends = [flat.start for flat in self.flat_blocks[1:]] + [self.num_elements]
        self.flat_blocks = [
            FlatBlock(flat.block, flat.start, end)
            for flat, end in zip(self.flat_blocks, ends, strict=True)
        ]

    @property
    def tied(self) -> bool:
        """Its one parameter is held by another pipeline stage too."""
        return _is_tied(self.stored[0])

    @property
    def shard_elements(self) -> int:
        return self.num_elements // self.num_data_ranks

    @property
    def shard_start(self) -> int:
        return self.data_rank * self.shard_elements

    @property
    def shard_stop(self) -> int:
        return self.shard_start + self.shard_elements

    @property
    def own_parameters(self) -> Tensor:
        """This rank's range of the parameters."""
        return self.parameters[self.shard_start : self.shard_stop]

    def allocate(self, device: torch.device, dtype: torch.dtype, main_dtype: torch.dtype) -> None:
        """Allocate parameters and master shard, and make every module parameter a view of them.

        Where both dtypes agree the master is the rank's range of the parameters itself.
        """
        self.parameters = torch.zeros(self.num_elements, dtype=dtype, device=device)
        own = self.own_parameters
        self.master = own if dtype == main_dtype else torch.zeros_like(own, dtype=main_dtype)
        for stored, offset in zip(self.stored, self.offsets, strict=True):
            shape = stored.parameter.shape
            view = self.parameters[offset : offset + prod(shape)].view(shape)
            replace_parameter(stored, nn.Parameter(view))

    def point_gradients_at(self, buffer: Tensor) -> None:
        """Make every parameter's `main_grad` a view of `buffer` [num_elements]."""
        for stored, offset in zip(self.stored, self.offsets, strict=True):
            parameter = stored.parameter
            size = parameter.numel()
            main_grad = buffer[offset : offset + size].view(parameter.shape)
            parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def forget_gradients(self, buffer: Tensor) -> None:
        """What `buffer` holds, where the gradients point, counts for nothing from here on: matrices
        are overwritten by their first contribution, all else is zeroed."""
        position = 0
        for stored, offset in zip(self.stored, self.offsets, strict=True):
            if len(stored.parameter.shape) > 1:
                mark_stale(stored.parameter)
                _zero(buffer, position, offset)
                position = offset + stored.parameter.numel()
        _zero(buffer, position, self.num_elements)

    def zero_stale(self) -> None:
        """Zero the matrices to which nothing has contributed. All contributions must be in."""
        for stored in self.stored:
            if take_stale(stored.parameter):
                stored.parameter.main_grad.zero_()  # type: ignore[attr-defined]

    def owned(self) -> list[OwnedBlock]:
        """What this rank's range covers, in order; the pieces tile the range exactly."""
        pieces = []
        for flat in self.flat_blocks:
            start = max(flat.start, self.shard_start)
            stop = min(flat.stop, self.shard_stop)
            if start < stop:
                origin = self.shard_start
                pieces.append(OwnedBlock(flat, start - origin, stop - origin))
        return pieces

    def replicated_range(self) -> tuple[int, int]:
        """The run of the shard, in shard elements, whose gradients are summed over tensor ranks."""
        inside = [piece for piece in self.owned() if piece.flat.block.replicated]
        return one_run(inside) if inside else (0, 0)


def replace_parameter(stored: StoredParameter, parameter: nn.Parameter) -> None:
    """Register `parameter` in the place of a stored one, in its module and the tied ones."""
    old = stored.parameter
    for module, attribute in stored.places:
        assert getattr(module, attribute) is old, stored.path
        setattr(module, attribute, parameter)


def _zero(buffer: Tensor, start: int, stop: int) -> None:
    if start < stop:
        buffer[start:stop].zero_()


def _storage_order(stored: StoredParameter) -> tuple[int, int]:
    vector = len(stored.parameter.shape) < 2
    replicated = any(block.replicated for block in stored.blocks)
    return (int(vector), int(replicated) if not vector else int(not replicated))


def _aligned(position: int) -> int:
    return (position + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def plan_buckets(
    chunks: Sequence[tuple[Sequence[str], Sequence[StoredParameter]]],
    *,
    bucket_bytes: float,
    main_itemsize: int,
    num_data_ranks: int,
    data_rank: int,
) -> list[Bucket]:
    """Join the units of each chunk (unit names in order, parameters) to buckets of about
    `bucket_bytes` of gradients, at least one unit each, in the order of forward.

    The first bucket of a chunk is smaller: its reduce-scatter is the last to start and its
    all-gather the first that is waited for, so nothing hides either.
    A parameter that another pipeline stage holds too gets a bucket of its own, so that its shards
    lie the same way on both stages.
    """
    buckets: list[Bucket] = []
    for chunk, (units, stored) in enumerate(chunks):
        here: list[Bucket] = []
        for members in _groups(units, stored, bucket_bytes / main_itemsize):
            used = [units.index(unit) for member in members for unit in member.units]
            here.append(
                Bucket(
                    name=f"chunk{chunk}.{members[0].path}",
                    chunk=chunk,
                    first_unit=min(used),
                    last_unit=max(used),
                    stored=members,
                    num_data_ranks=num_data_ranks,
                    data_rank=data_rank,
                )
            )
        buckets += sorted(here, key=lambda bucket: bucket.first_unit)
    return buckets


def _groups(
    units: Sequence[str], stored: Sequence[StoredParameter], max_elements: float
) -> list[list[StoredParameter]]:
    groups: list[list[StoredParameter]] = [[s] for s in stored if _is_tied(s)]
    open_group: list[StoredParameter] = []
    size, limit = 0, FIRST_BUCKET_SHARE * max_elements
    for unit in units:
        here = [s for s in stored if s.units[0] == unit and not _is_tied(s)]
        here_elements = sum(prod(s.parameter.shape) for s in here)
        if open_group and size + here_elements > limit:
            groups.append(open_group)
            open_group, size, limit = [], 0, max_elements
        open_group += here
        size += here_elements
    return [*groups, open_group] if open_group else groups


def _is_tied(stored: StoredParameter) -> bool:
    return any(block.tied for block in stored.blocks)
