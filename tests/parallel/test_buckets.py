"""Every element of every logical parameter is owned exactly once, whatever the sizes and degrees.

Random sets of modules are cut as a rank of each place would cut them; no rank runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from megascale.parallel.buckets import ALIGNMENT, Bucket, one_run, plan_buckets
from megascale.parallel.tensor import StoredParameter, TensorParallel, shard_chunk
from megascale.shards import Placement, range_boxes

TIED = "tied.a.weight"


class _Fused(nn.Module):
    """A matrix, or a vector, that stacks blocks of these rows."""

    def __init__(self, name: str, rows: Sequence[int], columns: int | None, bias: bool) -> None:
        super().__init__()
        self.names = [f"{name}.{letter}" for letter in "abc"[: len(rows)]]
        self.rows = rows
        shape = (sum(rows),) if columns is None else (sum(rows), columns)
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0], device="meta"))

    def storage_blocks(self) -> dict[str, list[tuple[str, int]]]:
        return {
            attribute: [(f"{n}.{attribute}", r) for n, r in zip(self.names, self.rows, strict=True)]
            for attribute in dict(self.named_parameters())
        }


@dataclass(frozen=True)
class Part:
    """One module: its placement, its block rows and columns (None: a vector), its unit."""

    placement: Placement
    rows: tuple[int, ...]
    columns: int | None
    bias: bool
    unit: int


@dataclass(frozen=True)
class Case:
    parts: tuple[Part, ...]
    tied: bool
    tp_size: int
    dp_size: int
    bucket_bytes: float


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp_size = draw(st.sampled_from([1, 2, 4]))
    parts = []
    for unit in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 3))):
            placement = draw(st.sampled_from(Placement))
            matrix = placement is not Placement.REPLICATED or draw(st.booleans())
            scale = tp_size if placement is Placement.COLUMN else 1
            count = draw(st.integers(1, 1 if placement is Placement.VOCAB else 3))
            rows = tuple(scale * draw(st.integers(1, 70)) for _ in range(count))
            columns = draw(st.integers(1, 20)) if matrix else None
            if placement is Placement.ROW and columns is not None:
                columns *= tp_size
            bias = placement is not Placement.VOCAB and draw(st.booleans())
            parts.append(Part(placement, rows, columns, bias, unit))
    return Case(
        tuple(parts),
        draw(st.booleans()),
        tp_size,
        draw(st.sampled_from([1, 2, 3, 4, 8])),
        draw(st.sampled_from([1.0, 4000.0, 1e9])),
    )


def _stored(case: Case, tp_rank: int) -> tuple[list[str], list[StoredParameter]]:
    chunk, table = nn.Module(), []
    num_units = max(part.unit for part in case.parts) + 1
    units: list[tuple[str, list[str]]] = [(f"unit{n}", []) for n in range(num_units)]
    parts = [(f"part{n}", part) for n, part in enumerate(case.parts)]
    if case.tied:
        parts.append(("tied", Part(Placement.VOCAB, (37,), 5, False, 0)))
    for name, part in parts:
        chunk.add_module(name, _Fused(name, part.rows, part.columns, part.bias))
        table.append((name, part.placement))
        units[part.unit][1].append(name)
    tp = TensorParallel(None, tp_rank, case.tp_size)
    return [name for name, _ in units], shard_chunk(
        chunk, table, units, tp, operators={}, tied=TIED if case.tied else None
    )


def _buckets(case: Case, tp_rank: int, dp_rank: int) -> list[Bucket]:
    return plan_buckets(
        [_stored(case, tp_rank)],
        bucket_bytes=case.bucket_bytes,
        main_itemsize=4,
        num_data_ranks=case.dp_size,
        data_rank=dp_rank,
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_boxes_of_all_ranks_tile_each_logical_parameter(case: Case) -> None:
    covered: dict[str, NDArray[np.int64]] = {}
    copies: dict[str, NDArray[np.int64]] = {}
    for tp_rank in range(case.tp_size):
        for dp_rank in range(case.dp_size):
            for bucket in _buckets(case, tp_rank, dp_rank):
                for piece in bucket.owned():
                    block = piece.flat.block
                    inside = bucket.shard_start + piece.start - piece.flat.start
                    last = min(inside + piece.stop - piece.start, block.box.num_elements)
                    counts = copies if block.is_copy else covered
                    count = counts.setdefault(block.name, np.zeros(block.global_shape, np.int64))
                    for _, box in range_boxes(block.box, min(inside, last), last):
                        corners = zip(box.offset, box.shape, strict=True)
                        count[tuple(slice(start, start + size) for start, size in corners)] += 1
    assert len(covered) == sum(len(part.rows) * (1 + part.bias) for part in case.parts) + int(
        case.tied
    )
    for name, count in covered.items():
        assert (count == 1).all(), name
    for name, count in copies.items():
        assert (count == case.tp_size - 1).all(), name


@settings(max_examples=60, deadline=None)
@given(cases())
def test_flats_tile_buckets_and_shards(case: Case) -> None:
    for bucket in _buckets(case, case.tp_size - 1, 0):
        stops = [flat.stop for flat in bucket.flat_blocks]
        assert stops[-1] == bucket.num_elements
        for flat, previous in zip(bucket.flat_blocks, [0, *stops], strict=False):
            assert flat.start == previous
            assert flat.start + flat.block.box.num_elements <= flat.stop
        assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
        assert bucket.num_elements % (ALIGNMENT * case.dp_size) == 0
    for dp_rank in range(case.dp_size):
        for bucket in _buckets(case, 0, dp_rank):
            owned = bucket.owned()
            assert (owned[0].start, owned[-1].stop) == (0, bucket.shard_elements)
            for piece, follower in pairwise(owned):
                assert piece.stop == follower.start
            for wanted in (True, False):  # matrices, then vectors: a decay rule is one run
                half = [piece for piece in owned if piece.flat.decay is wanted]
                assert not half or one_run(half) == (half[0].start, half[-1].stop)
            first, last = bucket.replicated_range()
            inside = [piece for piece in owned if first <= piece.start < last]
            assert all(piece.flat.block.replicated for piece in inside)
            assert sum(piece.flat.block.replicated for piece in owned) == len(inside)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_all_ranks_plan_the_same_communication(case: Case) -> None:
    """Names, sizes and units agree over tensor and data ranks, or their collectives would not."""
    plans = {
        tuple(
            (b.name, b.num_elements, b.first_unit, b.last_unit, tuple(b.offsets))
            for b in _buckets(case, tp_rank, dp_rank)
        )
        for tp_rank in range(case.tp_size)
        for dp_rank in range(case.dp_size)
    }
    assert len(plans) == 1
    buckets = _buckets(case, 0, 0)
    assert sum(bucket.tied for bucket in buckets) == int(case.tied)
    for bucket in buckets:
        if bucket.tied:
            assert len(bucket.stored) == 1
    elements = sum(prod(s.parameter.shape) for b in buckets for s in b.stored)
    _, stored = _stored(case, 0)
    assert elements == sum(prod(s.parameter.shape) for s in stored)


def test_units_join_up_to_the_limit() -> None:
    parts = tuple(Part(Placement.REPLICATED, (10,), 10, False, unit) for unit in range(5))
    buckets = _buckets(Case(parts, False, 1, 2, 4 * 200), 0, 0)
    assert [(b.first_unit, b.last_unit) for b in buckets] == [(0, 0), (1, 2), (3, 4)]
    assert [b.name for b in buckets] == ["chunk0.part0", "chunk0.part1", "chunk0.part3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_views_of_the_bucket_and_masters_of_its_range(dtype: torch.dtype) -> None:
    parts = (
        Part(Placement.COLUMN, (5, 3), 7, True, 0),
        Part(Placement.REPLICATED, (4,), None, False, 0),
    )
    (bucket,) = _buckets(Case(parts, False, 1, 2, 1e9), 0, 1)
    bucket.allocate(torch.device("cpu"), dtype, torch.float32)
    for stored, offset in zip(bucket.stored, bucket.offsets, strict=True):
        parameter = stored.parameter
        parameter.data.fill_(float(offset + 1))
        stop = offset + parameter.numel()
        assert (bucket.parameters[offset:stop] == offset + 1).all()
        assert parameter.storage_offset() == offset
    assert bucket.master.shape == (bucket.shard_elements,)
    shares = bucket.master.data_ptr() == bucket.parameters[bucket.shard_start :].data_ptr()
    assert shares is (dtype == torch.float32)
    gradients = torch.zeros(bucket.num_elements)
    bucket.point_gradients_at(gradients)
    for stored, offset in zip(bucket.stored, bucket.offsets, strict=True):
        main_grad = stored.parameter.main_grad  # type: ignore[attr-defined]
        main_grad.fill_(1.0)
        assert gradients[offset : offset + main_grad.numel()].sum() == main_grad.numel()
    assert gradients.sum() == sum(stored.parameter.numel() for stored in bucket.stored)
