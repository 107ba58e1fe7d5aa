"""Gradients that travel in bf16: within the stated bound, equal bits in each run, trained with."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale.parallel.buckets import ALIGNMENT, Bucket
from megascale.parallel.groups import Groups, create_groups
from megascale.parallel.reduce_scatter import BF16_ROUNDING, InBfloat16, InMainDtype
from megascale.parallel.tensor import StoredParameter
from megascale.shards import Block, Box
from megascale.topology import Mesh
from tests.distributed import run_ranks
from tests.parallel.test_gradients import _step
from tests.parallel.toy import Toy, engine

SHARD = 3 * ALIGNMENT
FP32_ROUNDING = 2.0**-24


def _bucket(rank: int, world_size: int) -> Bucket:
    """Of one vector that fills it."""
    shape = (world_size * SHARD,)
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    block = Block("vector", shape, Box((0,), shape), 0)
    stored = StoredParameter("vector", [(module, "weight")], (block,), ["unit"])
    return Bucket("bucket", 0, 0, 0, [stored], world_size, rank)


def _gradient(rank: int, num_elements: int) -> Tensor:
    """Of all sizes that fp32 holds and bf16 too."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(num_elements, generator=generator)
    return values * 2.0 ** torch.randint(-60, 60, (num_elements,), generator=generator)


def _sums(rank: int, world_size: int) -> float:
    """The largest error in units of its bound."""
    bucket, group = _bucket(rank, world_size), dist.group.WORLD
    assert group is not None
    full = [_gradient(r, bucket.num_elements) for r in range(world_size)]
    own = slice(bucket.shard_start, bucket.shard_stop)
    exact = sum(gradient[own].double() for gradient in full)
    sizes = torch.stack([gradient[own].double().abs() for gradient in full])
    others = sizes.sum(0) - sizes[rank]
    bound = BF16_ROUNDING * others + world_size * FP32_ROUNDING * sizes.sum(0)
    reduction = InBfloat16(torch.device("cpu"))
    buffers = [full[rank].clone() for _ in range(2)]
    results = [reduction.start(bucket, buffer, group) for buffer in buffers]  # both in flight
    first, second = (pending.wait() for pending in results)
    assert torch.equal(first, second)
    assert first.data_ptr() == buffers[0][own].data_ptr()
    in_order = full[rank][own].clone()
    for r, gradient in enumerate(full):
        if r != rank:
            in_order += gradient[own].bfloat16()
    assert torch.equal(first, in_order), "not summed in the order of ranks"
    reference = InMainDtype().start(bucket, full[rank].clone(), group).wait()
    assert not torch.equal(first, reference), "nothing was rounded"
    return float(((first - exact).abs() / bound).max())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_error_is_within_its_bound(num_ranks: int) -> None:
    """Half the bytes, not a lower precision of the sum: the bound grows with what others send."""
    worst = run_ranks(_sums, num_ranks)
    assert max(worst) <= 1.0
    assert max(worst) > 0.5, "the bound says nothing"


def _specials(rank: int, world_size: int) -> list[float]:
    bucket, group = _bucket(rank, world_size), dist.group.WORLD
    assert group is not None
    full = torch.zeros(bucket.num_elements)
    if rank == 1:
        full[:3] = torch.tensor([torch.inf, torch.nan, 3.4e38])
    return InBfloat16(torch.device("cpu")).start(bucket, full, group).wait()[:4].tolist()


def test_what_is_not_finite_stays_so() -> None:
    """... and what rounds beyond bf16's largest number: the step is masked, not wrong."""
    first, *_ = run_ranks(_specials, 2)
    assert first[0] == float("inf")
    assert first[1] != first[1]
    assert first[2] == float("inf")
    assert first[3] == 0.0


def _groups(world_size: int) -> Groups:
    return create_groups(Mesh(data=world_size), tied_embeddings=False, timeout_s=30.0)


def _steps(rank: int, world_size: int) -> list[list[float]]:
    """The whole rank's gradient after two steps: by main dtype and bf16, ZeRO-1 and ZeRO-2."""
    found = []
    groups = _groups(world_size)
    for in_bfloat16 in (False, True):
        for zero_stage in (1, 2):
            chunk = Toy(range(3), last=False)
            options = {"zero_stage": zero_stage, "bucket_bytes": 3000.0}
            zero = engine([chunk], groups, **options, reduce_in_bfloat16=in_bfloat16)  # type: ignore[arg-type]
            zero.gather_parameters()
            for _ in range(2):  # on the same buffers
                _step(zero, chunk, rank)
            found.append(torch.cat([flat.grad for flat in zero.flats()]).tolist())
    return found


def test_both_stages_reduce_in_bf16() -> None:
    for found in run_ranks(_steps, 2):
        first, second, *bf16 = (torch.tensor(values, dtype=torch.float64) for values in found)
        scale = first.abs().max()
        assert (first - second).abs().max() <= 1e-12 * scale
        for got in bf16:  # ZeRO-2 rounds in each of two micro-batches, which may cancel
            error = (got - first).abs().max() / scale
            assert 1e-6 < error < 4 * BF16_ROUNDING
