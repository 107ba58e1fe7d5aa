"""Sharded data parallelism against one process that sees all data, on collectives that are late."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from megascale.flux.collectives import Pending, all_gather_into, reduce_scatter_into
from megascale.ops.main_gradient import add_to_main_gradient
from megascale.parallel import gathering, reduce_scatter
from megascale.parallel.buckets import plan_buckets
from megascale.parallel.groups import Groups, create_groups
from megascale.parallel.tensor import StoredParameter
from megascale.parallel.zero import ShardedDataParallel
from megascale.shards import Block, Box
from megascale.topology import Mesh
from tests.distributed import run_ranks
from tests.parallel.live import forget_live_tensors, live_bytes
from tests.parallel.toy import OUT, WIDTH, Toy, engine, fill, parameters, toys

NUM_STEPS, NUM_MICRO_BATCHES, LR = 3, 3, 1e-3
TOLERANCE = 1e-12  # relative, fp64: the sums differ in order alone
TINY, JOINED, ALL = 1.0, 3000.0, 1e9  # bytes of a bucket: each unit alone, some joined, one a chunk
VARIANTS = [
    (zero_stage, bucket_bytes, late)
    for zero_stage in (1, 2)
    for bucket_bytes in (TINY, JOINED, ALL)
    for late in (False, True)
]
Variant = tuple[int, float, bool]


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)  # of all parameters, at the end
    digest: str = ""


def _groups(mesh: Mesh, **options: bool) -> Groups:
    return create_groups(mesh, tied_embeddings=options.get("tied", False), timeout_s=30.0)


def _data(step: int, dp_rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * dp_rank + micro_batch)
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randn(5, OUT, dtype=torch.float64, generator=generator)


def _forward_backward(
    zero: ShardedDataParallel | None, chunks: list[Toy], x: Tensor, target: Tensor, last: bool
) -> float:
    """One micro-batch through two chunks that meet only in a hidden state, as a pipeline's do."""
    hidden = chunks[0](x)
    received = hidden.detach().requires_grad_()
    loss = ((chunks[1](received) - target) ** 2).sum()
    if zero is not None:
        zero.backward_started(1, last_micro_batch=last)
    loss.backward()
    if zero is not None:
        zero.backward_ended(1)
        zero.backward_started(0, last_micro_batch=last)
    hidden.backward(received.grad)
    if zero is not None:
        zero.backward_ended(0)
    return loss.item()


def _reference(num_ranks: int) -> Outcome:
    chunks = toys("cpu")
    fill(chunks)
    outcome = Outcome()
    for step in range(NUM_STEPS):
        loss = 0.0
        for dp_rank in range(num_ranks):
            for micro_batch in range(NUM_MICRO_BATCHES):
                x, target = _data(step, dp_rank, micro_batch)
                loss += _forward_backward(None, chunks, x, target, False)
        with torch.no_grad():
            for _, parameter in parameters(chunks):
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=LR)
                parameter.grad = None
        outcome.losses.append(loss)
    outcome.values = [p.detach().numpy() for _, p in parameters(chunks)]
    return outcome


class _Late(Pending):
    """A collective that runs when it is waited for, no earlier."""

    def __init__(self, out: Tensor, source: Tensor, start: Any, group: dist.ProcessGroup) -> None:
        super().__init__(out, None)
        self._start: Any = lambda: start(out, source, group)

    def wait(self) -> Tensor:
        started, self._start = self._start, None
        return started().wait() if started else self._value


@contextmanager
def _late_collectives() -> Iterator[None]:
    """What a collective will write holds NaN until somebody waits for it."""

    def gather(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> Pending:
        own = part.clone()
        first = dist.get_rank(group) * part.numel()
        out[:first] = out[first + part.numel() :] = torch.nan
        return _Late(out, own, all_gather_into, group)

    def scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Pending:
        out.fill_(torch.nan)
        return _Late(out, whole, reduce_scatter_into, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "all_gather_into", gather)
        patch.setattr(reduce_scatter, "reduce_scatter_into", scatter)
        yield


@torch.no_grad()
def _descend(zero: ShardedDataParallel) -> None:
    for flat in zero.flats():
        flat.master.sub_(flat.grad, alpha=LR)


def _train(rank: int, groups: Groups, variant: Variant) -> Outcome:
    zero_stage, bucket_bytes, _ = variant
    chunks = toys()
    zero = engine(chunks, groups, zero_stage=zero_stage, bucket_bytes=bucket_bytes)
    zero.gather_parameters()
    outcome = Outcome()
    for step in range(NUM_STEPS):
        zero.start_step()
        loss = 0.0
        for micro_batch in range(NUM_MICRO_BATCHES):
            x, target = _data(step, rank, micro_batch)
            last = micro_batch == NUM_MICRO_BATCHES - 1
            loss += _forward_backward(zero, chunks, x, target, last)
        zero.finish_gradients()
        _descend(zero)
        zero.gather_parameters()  # waited for by the boundaries of the next forward alone
        outcome.losses.append(loss)
    zero.wait_for_parameters()
    outcome.values = [p.detach().numpy().copy() for _, p in parameters(chunks)]
    stored = torch.cat([bucket.parameters for bucket in zero.buckets])
    outcome.digest = hashlib.sha256(stored.numpy().tobytes()).hexdigest()
    return outcome


def _train_all(rank: int, world_size: int) -> dict[Variant, Outcome]:
    groups = _groups(Mesh(data=world_size))
    outcomes = {}
    for variant in VARIANTS:
        with _late_collectives() if variant[2] else nullcontext():
            outcomes[variant] = _train(rank, groups, variant)
    return outcomes


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_variants_train_what_one_process_trains(num_ranks: int) -> None:
    """Both stages accumulate the same over micro-batches, chunks, joined and tiny buckets, a matrix
    that two units share, and collectives that end as late as they may."""
    reference = _reference(num_ranks)
    assert reference.losses[-1] < reference.losses[0]  # large steps would amplify rounding
    by_rank = run_ranks(_train_all, num_ranks)
    for variant in VARIANTS:
        outcomes = [outcomes[variant] for outcomes in by_rank]
        losses = np.sum([outcome.losses for outcome in outcomes], axis=0)
        np.testing.assert_allclose(losses, reference.losses, rtol=TOLERANCE, err_msg=str(variant))
        for outcome in outcomes:
            assert outcome.digest == outcomes[0].digest, f"replicas differ in {variant}"
            for got, expected in zip(outcome.values, reference.values, strict=True):
                scale = np.abs(expected).max()
                assert np.abs(got - expected).max() <= TOLERANCE * scale, variant


# ---------------------------------------------------------------- when things happen


def _events(rank: int, world_size: int) -> dict[tuple[int, bool], list[str]]:
    """Of one backward of one chunk, by ZeRO stage and whether it is the last micro-batch's."""
    groups = _groups(Mesh(data=world_size))
    events: list[str] = []

    def span(name: str, /, **fields: Any) -> AbstractContextManager[None]:
        if name == "grad_sync":
            events.append(f"{fields['op']} {fields.get('bucket', '')}".strip())
        return nullcontext()

    found = {}
    for zero_stage in (1, 2):
        chunk = Toy(range(4), last=False)
        zero = engine([chunk], groups, zero_stage=zero_stage, bucket_bytes=TINY, span=span)
        marked = chunk.before_unit

        def before_unit(name: str, x: Tensor, marked: Any = marked) -> Tensor:
            x = marked(name, x)
            x.register_hook(lambda _grad: events.append(f"backward {name}"))
            return x

        chunk.before_unit = before_unit
        for last in (False, True):
            events.clear()
            zero.start_step()
            loss = chunk(_data(0, rank, 0)[0].requires_grad_()).sum()
            zero.backward_started(0, last_micro_batch=last)
            loss.backward()
            zero.backward_ended(0)
            zero.finish_gradients()
            found[zero_stage, last] = list(events)
    return found


def test_each_bucket_is_reduced_between_its_backward_and_the_next() -> None:
    """Not before its last gradient is there, and not after the backward of what lies below."""
    for found in run_ranks(_events, 2):
        backward = [f"backward layers.{n}" for n in (3, 2, 1, 0)]
        reduce = [f"reduce_scatter chunk0.layers.{n}.norm" for n in (3, 2, 1, 0)]
        in_turn = [event for pair in zip(backward, reduce, strict=True) for event in pair]
        assert found[1, False] == [*backward, "finish"]
        assert found[1, True] == found[2, False] == found[2, True] == [*in_turn, "finish"]


def _waits(rank: int, world_size: int) -> list[str]:
    """Units and arrivals of parameters, in the order in which a forward pass meets them."""
    events: list[str] = []
    groups = _groups(Mesh(data=world_size))

    class Watched(_Late):
        def wait(self) -> Tensor:
            events.append("arrived")
            return super().wait()

    def gather(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> Pending:
        return Watched(out, part, all_gather_into, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "all_gather_into", gather)
        chunk = Toy(range(3), last=False)
        zero = engine([chunk], groups, zero_stage=1, bucket_bytes=TINY)
        zero.gather_parameters()
        for name, layer in chunk.layers.items():
            layer.register_forward_pre_hook(lambda _m, _x, name=name: events.append(name))
        chunk(_data(0, rank, 0)[0])
        zero.gather_parameters()
        events.append("again")
        zero.gather_parameters()  # what is on its way arrives before it is sent anew
    return events


def test_a_unit_waits_for_its_own_parameters_alone() -> None:
    in_turn = ["arrived", "0", "arrived", "1", "arrived", "2"]
    for events in run_ranks(_waits, 2):
        assert events == [*in_turn, "again", "arrived", "arrived", "arrived"]


# ---------------------------------------------------------------- memory


def _gradient_bytes(rank: int, world_size: int) -> list[tuple[int, int, int, int]]:
    """By ZeRO stage: measured gradient bytes at the end of a step; elements of the parameters, of
    this rank's shard and of the largest bucket."""
    groups = _groups(Mesh(data=world_size))
    return [_measure_gradients(rank, groups, zero_stage) for zero_stage in (1, 2)]


def _measure_gradients(rank: int, groups: Groups, zero_stage: int) -> tuple[int, int, int, int]:
    forget_live_tensors()
    chunk = Toy(range(8), last=False, dtype=torch.bfloat16)
    zero = engine([chunk], groups, zero_stage=zero_stage, bucket_bytes=TINY, dtype=torch.bfloat16)
    zero.start_step()
    for micro_batch in range(2):
        loss = chunk(_data(0, rank, micro_batch)[0].bfloat16()).sum()
        zero.backward_started(0, last_micro_batch=micro_batch == 1)
        loss.backward()
        zero.backward_ended(0)
    zero.finish_gradients()
    del loss
    elements = sum(bucket.num_elements for bucket in zero.buckets)
    shard = sum(bucket.shard_elements for bucket in zero.buckets)
    gradients = live_bytes() - 2 * elements - 4 * shard  # parameters, masters
    return gradients, elements, shard, zero.buckets[0].num_elements


def test_zero_2_keeps_gradients_of_a_shard_and_of_the_buckets_in_flight() -> None:
    """bf16 parameters: 4 bytes a parameter under ZeRO-1, 4 / data ranks under ZeRO-2."""
    for found in run_ranks(_gradient_bytes, 2):
        gradients, elements, _, _ = found[0]
        assert gradients == 4 * elements
        gradients, elements, shard, bucket = found[1]
        assert elements == 8 * bucket
        assert shard == elements // 2
        assert gradients == 4 * (shard + 2 * bucket)  # one is filled while one is reduced


def _rounded(rank: int, world_size: int) -> bool:
    """Do bf16 parameters hold the fp32 masters of all ranks, after masters have changed?"""
    groups = _groups(Mesh(data=world_size))
    chunk = Toy(range(2), last=False, dtype=torch.bfloat16)
    zero = engine([chunk], groups, zero_stage=1, bucket_bytes=ALL, dtype=torch.bfloat16)
    (bucket,) = zero.buckets
    bucket.master.copy_(torch.linspace(rank, rank + 1, bucket.shard_elements))
    zero.gather_parameters()
    zero.wait_for_parameters()
    parts = [torch.linspace(r, r + 1, bucket.shard_elements) for r in range(world_size)]
    return torch.equal(bucket.parameters, torch.cat(parts).bfloat16())


def test_bf16_parameters_are_the_masters_of_all_ranks_rounded() -> None:
    assert run_ranks(_rounded, 2) == [True, True]


# ---------------------------------------------------------------- tensor and embedding groups


def _stored(name: str, shape: tuple[int, ...], **options: bool) -> StoredParameter:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    block = Block(name, shape, Box((0,) * len(shape), shape), 0, **options)
    return StoredParameter(name, [(module, "weight")], (block,), ["unit"])


def _sums(rank: int, world_size: int, mesh: Mesh) -> dict[str, list[float]]:
    """The values in each parameter's gradient after two steps in which rank r adds 2 ** r."""
    tied = mesh.pipeline > 1
    groups = _groups(mesh, tied=tied)
    place = groups.coordinates
    stored = [
        _stored("table", (9, 17), tied=tied, tied_copy=tied and place.pp_rank == 1),
        _stored("matrix", (11, 15)),
        _stored("positions", (6, 27), replicated=mesh.tensor > 1),
        _stored("norm", (7,), replicated=mesh.tensor > 1),
        _stored("bias", (5,)),
    ]
    buckets = plan_buckets(
        [(["unit"], stored)],
        bucket_bytes=ALL,
        main_itemsize=8,
        num_data_ranks=mesh.data,
        data_rank=place.dp_rank,
    )
    found: dict[str, list[float]] = {}
    for zero_stage in (1, 2):
        zero = ShardedDataParallel(
            buckets,
            groups,
            zero_stage=zero_stage,
            device=torch.device("cpu"),
            dtype=torch.float64,
            main_dtype=torch.float64,
        )
        for _ in range(2):  # on the same buffers
            zero.start_step()
            zero.backward_started(0, last_micro_batch=True)
            for parameter in stored:
                gradient = torch.full(parameter.parameter.shape, 2.0**rank)
                add_to_main_gradient(parameter.parameter, gradient)
            zero.backward_ended(0)
            zero.finish_gradients()
        for segment in (segment for flat in zero.flats() for segment in flat.segments):
            values = segment.grad[segment.grad != 0].unique().tolist()  # gaps stay zero
            assert found.setdefault(segment.name, values) == values, (zero_stage, segment.name)
    return {name: values for name, values in found.items() if values}


def test_replicated_gradients_are_summed_over_tensor_ranks_once() -> None:
    names = set()
    for rank, sums in enumerate(run_ranks(_sums, 4, Mesh(tensor=2, data=2))):
        own = [5.0] if rank % 2 == 0 else [10.0]  # ranks 0 and 2, or 1 and 3: over data ranks
        for name, values in sums.items():
            assert values == ([15.0] if name in ("positions", "norm") else own), (rank, name)
        names |= sums.keys()
    assert names == {"table", "matrix", "positions", "norm", "bias"}


def test_tied_gradients_are_summed_over_both_stages() -> None:
    names = set()
    for rank, sums in enumerate(run_ranks(_sums, 4, Mesh(data=2, pipeline=2))):
        own = [3.0] if rank < 2 else [12.0]
        for name, values in sums.items():
            assert values == ([15.0] if name == "table" else own), (rank, name)
        names |= sums.keys()
    assert names == {"table", "matrix", "positions", "norm", "bias"}
