"""Gradients that are not zeroed, and when buckets are reduced and gathered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.parallel.groups import Groups, create_groups
from megascale.parallel.zero import ShardedDataParallel
from megascale.topology import Mesh
from tests.distributed import run_ranks
from tests.parallel.toy import WIDTH, Toy, engine

TINY = 1.0  # bytes of a bucket: each unit alone
NUM_UNITS = 3

Steps = Callable[[ShardedDataParallel, Toy, int], None]


def _groups(world_size: int) -> Groups:
    return create_groups(Mesh(data=world_size), tied_embeddings=False, timeout_s=30.0)


def _input(rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)


def _backward(zero: ShardedDataParallel, chunk: Toy, x: Tensor, *, last: bool) -> None:
    loss = chunk(x.clone().requires_grad_()).pow(2).sum()
    zero.backward_started(0, last_micro_batch=last)
    loss.backward()
    zero.backward_ended(0)


def _step(zero: ShardedDataParallel, chunk: Toy, rank: int) -> None:
    """Two micro-batches; parameters stay as they are."""
    zero.start_step()
    _backward(zero, chunk, _input(rank, 1), last=False)
    _backward(zero, chunk, _input(rank, 2), last=True)
    zero.finish_gradients()


def _gradients(zero: ShardedDataParallel) -> list[Tensor]:
    return [flat.grad.clone() for flat in zero.flats()]


def _engine(world_size: int, zero_stage: int, **options: Any) -> tuple[ShardedDataParallel, Toy]:
    chunk = Toy(range(NUM_UNITS), last=False)
    groups = _groups(world_size)
    zero = engine([chunk], groups, zero_stage=zero_stage, bucket_bytes=TINY, **options)
    zero.gather_parameters()
    return zero, chunk


def _poison(zero: ShardedDataParallel) -> None:
    """What the step before left, at its worst."""
    for parameter in (stored.parameter for bucket in zero.buckets for stored in bucket.stored):
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.fill_(torch.nan)  # type: ignore[attr-defined]
    for bucket in zero.buckets:
        bucket.gradient.fill_(torch.nan)


# ---------------------------------------------------------------- stale gradients


def _after_garbage(rank: int, world_size: int) -> None:
    for zero_stage in (1, 2):
        zero, chunk = _engine(world_size, zero_stage)
        _step(zero, chunk, rank)
        expected = _gradients(zero)
        assert all(gradient.any() for gradient in expected)
        _poison(zero)
        _step(zero, chunk, rank)
        for got, wanted in zip(_gradients(zero), expected, strict=True):
            assert torch.equal(got, wanted), zero_stage


def _after_a_failure(rank: int, world_size: int) -> None:
    """A step that ends in the middle of a backward, some buckets on their way, leaves nothing."""

    class Failure(Exception):
        pass

    def fail(_gradient: Tensor) -> None:
        raise Failure

    for zero_stage in (1, 2):
        zero, chunk = _engine(world_size, zero_stage)
        _step(zero, chunk, rank)
        expected = _gradients(zero)
        for overlap in (True, False):
            zero._gradients.overlap = overlap
            zero.start_step()
            _backward(zero, chunk, _input(rank, 3), last=False)
            x = _input(rank, 4).requires_grad_()
            marked, chunk.before_unit = chunk.before_unit, _failing(chunk.before_unit, fail)
            loss = chunk(x).pow(2).sum()
            chunk.before_unit = marked
            zero.backward_started(0, last_micro_batch=True)
            with pytest.raises(Failure):
                loss.backward()
            _step(zero, chunk, rank)
            for got, wanted in zip(_gradients(zero), expected, strict=True):
                assert torch.equal(got, wanted), (zero_stage, overlap)


def _failing(
    before_unit: Callable[[str, Tensor], Tensor], fail: Callable[[Tensor], None]
) -> Callable[[str, Tensor], Tensor]:
    """Backward fails between the second unit and the first."""

    def fails(name: str, x: Tensor) -> Tensor:
        x = before_unit(name, x)
        if name == "layers.1":
            x.register_hook(fail)
        return x

    return fails


def _without_a_unit(rank: int, world_size: int) -> None:
    """A matrix that took no part in a step has a gradient of zeros, not that of the step before."""
    for zero_stage in (1, 2):
        zero, chunk = _engine(world_size, zero_stage)
        _step(zero, chunk, rank)
        _poison(zero)
        idle = chunk.layers["1"]
        forward = idle.forward
        idle.forward = lambda x: x
        _step(zero, chunk, rank)
        idle.forward = forward
        for flat, run in zip(zero.flats(), zero.runs, strict=True):
            assert flat.grad.any() == (run.bucket.first_unit != 1), zero_stage
            assert flat.grad.isfinite().all()


def _idle_data_parallel(rank: int, world_size: int) -> None:
    """Without data ranks nothing is reduced, and stale gradients are zeroed all the same."""
    _after_garbage(rank, world_size)
    _without_a_unit(rank, world_size)


@pytest.mark.parametrize(
    "program", [_after_garbage, _after_a_failure, _without_a_unit], ids=lambda f: f.__name__[1:]
)
def test_stale_gradients_do_not_count(program: Callable[[int, int], None]) -> None:
    run_ranks(program, 2)


def test_stale_gradients_do_not_count_on_one_rank() -> None:
    run_ranks(_idle_data_parallel, 1)


# ---------------------------------------------------------------- when buckets are reduced


def _order(
    rank: int, world_size: int
) -> dict[tuple[int, bool], tuple[list[str], list[list[float]]]]:
    """Events of the last micro-batch, and gradients, by ZeRO stage and overlap."""
    found = {}
    for zero_stage in (1, 2):
        for overlap in (True, False):
            events: list[str] = []

            def span(name: str, /, events: list[str] = events, **fields: Any) -> Any:
                if name == "grad_sync":
                    events.append(f"{fields['op']} {fields.get('bucket', '')}".strip())
                return nullcontext()

            zero, chunk = _engine(world_size, zero_stage, span=span, overlap_grad_reduce=overlap)
            zero.start_step()
            _backward(zero, chunk, _input(rank, 1), last=False)
            events.clear()
            _backward(zero, chunk, _input(rank, 2), last=True)
            events.append("backward has ended")
            numbers: list[int] = []

            def final(
                number: int, numbers: list[int] = numbers, events: list[str] = events
            ) -> None:
                numbers.append(number)
                events.append("final")

            zero.finish_gradients(final)
            assert sorted(numbers) == list(range(len(zero.runs))), "each flat once"
            found[zero_stage, overlap] = (events, [g.tolist() for g in _gradients(zero)])
    return found


def test_without_overlap_reductions_start_after_all_of_backward() -> None:
    """... and in the same order; the gradients are the same to the last bit. ZeRO-2, whose buffers
    cannot wait, starts as before (and waits at once)."""
    reduce = [f"reduce_scatter chunk0.layers.{n}.norm" for n in (2, 1, 0)]
    for found in run_ranks(_order, 2):
        finals = ["final"] * len(found[1, True][1])
        early = [*reduce, "backward has ended", "finish", *finals]
        late = ["backward has ended", "finish", *reduce, *finals]
        assert found[1, True][0] == found[2, True][0] == found[2, False][0] == early
        assert found[1, False][0] == late
        for zero_stage in (1, 2):
            assert found[zero_stage, True][1] == found[zero_stage, False][1]


def _waits_at_once(rank: int, world_size: int) -> list[int]:
    """Reductions in flight after each start, under ZeRO-2 with the overlap off."""
    zero, chunk = _engine(world_size, 2, overlap_grad_reduce=False)
    counts: list[int] = []
    marked = chunk.before_unit

    def count(name: str, x: Tensor) -> Tensor:
        x = marked(name, x)
        x.register_hook(lambda _gradient: counts.append(len(zero._gradients._reducing)))
        return x

    chunk.before_unit = count
    _step(zero, chunk, rank)
    return counts


def test_zero_2_without_overlap_has_nothing_in_flight() -> None:
    assert run_ranks(_waits_at_once, 2) == [[0] * (2 * NUM_UNITS)] * 2


# ---------------------------------------------------------------- when buckets are gathered


def _update(rank: int, world_size: int) -> dict[bool, list[str]]:
    """Gathers and updates of flats in the order in which they happen, by overlap."""
    found = {}
    for overlap in (True, False):
        events: list[str] = []

        def span(name: str, /, events: list[str] = events, **fields: Any) -> Any:
            if name == "param_gather":
                events.append(f"{fields['op']} {fields['bucket']}")
            return nullcontext()

        zero, chunk = _engine(world_size, 1, span=span, overlap_param_gather=overlap)
        _step(zero, chunk, rank)
        events.clear()
        for number, flat in enumerate(zero.flats()):
            flat.master.fill_(number)
            events.append(f"flat {number}")
            zero.flat_updated(number)
        zero.finish_update()
        events.append("ended")
        chunk(_input(rank, 1))
        for bucket in zero.buckets:
            assert torch.equal(bucket.parameters.unique(), _numbers_of(zero, bucket.name))
        found[overlap] = events
    return found


def _numbers_of(zero: ShardedDataParallel, name: str) -> Tensor:
    """What all ranks' flats of a bucket were filled with; ranks number theirs alike here."""
    numbers = [float(n) for n, run in enumerate(zero.runs) if run.bucket.name == name]
    return torch.tensor(numbers, dtype=torch.float64)


def test_a_bucket_is_gathered_once_its_flats_are_updated() -> None:
    """With the overlap, while the optimizer goes on, and waited for by its unit; without, after all
    of it, and waited for before the next step begins."""
    names = [f"chunk0.layers.{n}.norm" for n in range(NUM_UNITS)]
    for found in run_ranks(_update, 1 + 1):
        flats = {name: [e for e in found[True] if e.startswith("flat")] for name in names}
        per_bucket = len(flats[names[0]]) // NUM_UNITS
        overlapped: list[str] = []
        for k, name in enumerate(names):
            overlapped += [f"flat {k * per_bucket + i}" for i in range(per_bucket)]
            overlapped.append(f"all_gather {name}")
        assert found[True] == [*overlapped, "ended", *(f"wait {name}" for name in names)]
        updates = [event for event in found[True] if event.startswith("flat")]
        gathers = [f"{op} {name}" for op in ("all_gather", "wait") for name in names]
        assert found[False] == [*updates, *gathers, "ended"]
