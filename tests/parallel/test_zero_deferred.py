"""Data parallelism over deferred weight gradients: a bucket leaves when its gradients are there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.ops.deferred import DeferredWork, deferring, run
from megascale.ops.joined import accumulate_joined
from megascale.parallel.groups import create_groups
from megascale.parallel.zero import ShardedDataParallel
from megascale.topology import Mesh
from tests.distributed import run_ranks
from tests.parallel.toy import OUT, WIDTH, Toy, engine, fill, parameters, toys

NUM_MICRO_BATCHES, DELAY = 4, 2
TINY, ALL = 1.0, 1e9  # bytes of a bucket: each unit alone, one a chunk
TOLERANCE = 1e-12


def _data(rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randn(5, OUT, dtype=torch.float64, generator=generator)


def _loss(chunks: list[Toy], rank: int, micro_batch: int) -> Tensor:
    x, target = _data(rank, micro_batch)
    y: Tensor = chunks[1](chunks[0](x))
    return ((y - target) ** 2).sum()


def _reference(num_ranks: int) -> dict[str, list[float]]:
    chunks = toys("cpu")
    fill(chunks)
    for rank in range(num_ranks):
        for m in range(NUM_MICRO_BATCHES):
            _loss(chunks, rank, m).backward()
    found = {}
    for name, parameter in parameters(chunks):
        assert parameter.grad is not None
        found[name] = parameter.grad.flatten().tolist()
    return found


def _backward_in_halves(
    zero: ShardedDataParallel, chunks: list[Toy], rank: int, joined: int, log: list[str]
) -> None:
    """Inputs' halves, and weights' halves DELAY backwards later; both chunks the same way."""
    works: list[list[tuple[int, DeferredWork]]] = [[], []]

    def weights(number: int, count: int) -> None:
        ready, works[number] = works[number][:count], works[number][count:]
        last = ready[-1][0] == NUM_MICRO_BATCHES - 1
        zero.backward_started(number, last_micro_batch=last)
        log.append("weights")
        run([work for _, work in ready], accumulate_joined)
        zero.backward_ended(number)

    for m in range(NUM_MICRO_BATCHES):
        x, target = _data(rank, m)
        hidden = chunks[0](x)
        received = hidden.detach().requires_grad_()
        loss = ((chunks[1](received) - target) ** 2).sum()
        works[1].append((m, DeferredWork()))
        log.append("inputs")
        with deferring(works[1][-1][1]):
            loss.backward()
        works[0].append((m, DeferredWork()))
        with deferring(works[0][-1][1]):
            hidden.backward(received.grad)
        for number in (1, 0):
            if len(works[number]) > DELAY + joined - 1:
                weights(number, joined)
    for number in (1, 0):
        while works[number]:
            weights(number, joined)


def _train(
    rank: int, world_size: int, zero_stage: int, bucket_bytes: float, joined: int
) -> tuple[dict[str, list[float]], list[str]]:
    groups = create_groups(Mesh(data=world_size), tied_embeddings=False, timeout_s=30.0)
    log: list[str] = []

    def span(name: str, /, **fields: Any) -> AbstractContextManager[Any]:
        if name == "grad_sync" and fields["op"] == "reduce_scatter":
            log.append("reduce")
        return nullcontext()

    chunks = toys()
    zero = engine(chunks, groups, zero_stage=zero_stage, bucket_bytes=bucket_bytes, span=span)
    for _ in range(2):  # the second step meets the state that the first left
        zero.start_step()
        log.clear()
        _backward_in_halves(zero, chunks, rank, joined, log)
        zero.finish_gradients()
    found = {}
    for bucket in zero.buckets:
        whole = torch.zeros(bucket.num_elements, dtype=torch.float64)
        whole[bucket.shard_start : bucket.shard_stop] = bucket.gradient
        torch.distributed.all_reduce(whole)
        for stored, offset in zip(bucket.stored, bucket.offsets, strict=True):
            size = stored.parameter.numel()
            name = next(n for n, p in parameters(chunks) if p is stored.parameter)
            found[name] = whole[offset : offset + size].tolist()
    return found, log


@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [TINY, ALL])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_gradients_equal_one_process(zero_stage: int, bucket_bytes: float, joined: int) -> None:
    expected = _reference(2)
    for found, _ in run_ranks(_train, 2, zero_stage, bucket_bytes, joined):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = np.abs(gradient).max()
            assert np.abs(np.subtract(found[name], gradient)).max() < TOLERANCE * scale, name


def test_buckets_leave_in_the_weights_half_one_after_the_other() -> None:
    """ZeRO-1: none before a chunk's last weights began; none because of an input's half."""
    for _, log in run_ranks(_train, 2, 1, TINY, 1):
        reduces = [i for i, entry in enumerate(log) if entry == "reduce"]
        assert len(reduces) > 4, "several buckets a chunk"
        chunk_0_waits = DELAY
        assert log[: reduces[0]].count("weights") == 2 * NUM_MICRO_BATCHES - chunk_0_waits
        assert log[reduces[0] - 1] == "weights"
        assert "inputs" not in log[reduces[0] :]
