"""A step without communication: nothing moves, numbers stay numbers, and all is as it was after."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megascale.config import load_config
from megascale.flux import collectives
from megascale.parallel.spans import no_span
from megascale.train.assemble import assemble
from megascale.train.corpus import make_loader
from megascale.train.step import train_step
from megascale.train.waterfall.silence import silenced
from tests.distributed import run_ranks
from tests.train.waterfall.measured import SMALL


def _only_rank_0_steps(rank: int, world_size: int, settings: list[str]) -> list[float]:
    """With communication it would wait for ever."""
    config = load_config(None, [*SMALL, *settings])
    mesh = config.mesh(world_size)
    assembly = assemble(config, mesh, torch.device("cpu"))
    if rank == 1:
        return []
    loader = make_loader(config, mesh, assembly.groups.coordinates, 0)
    losses = []
    with silenced(no_span):
        for _ in range(3):
            batch = next(loader)
            outcome = train_step(
                assembly, batch.micro_batches, global_batch=batch.num_samples, lr=1e-3
            )
            losses.append(outcome.summary.read()[0])
    loader.close()
    return losses


def test_a_rank_needs_nobody() -> None:
    for settings in (
        ["parallelism.tensor_parallel_size=2"],
        ["parallelism.pipeline_parallel_size=2", "parallelism.virtual_pipeline_size=2"],
        [
            *("parallelism.pipeline_parallel_size=2", "parallelism.virtual_pipeline_size=2"),
            "parallelism.share_head=true",
        ],
        ["parallelism.zero_stage=2"],
        ["parallelism.grad_reduce_dtype=bfloat16"],
    ):
        losses = run_ranks(_only_rank_0_steps, 2, settings)[0]
        assert len(losses) == 3
        assert all(map(math.isfinite, losses)), settings


def _sum_before_inside_and_after(rank: int, world_size: int) -> list[float]:
    values = []
    originals = (dist.all_reduce, dist.isend, collectives._gather_single)
    for inside in (False, True, False):
        x = torch.ones(1)
        if inside:
            with silenced():
                dist.all_reduce(x)
        else:
            dist.all_reduce(x)
        values.append(float(x))
    assert (dist.all_reduce, dist.isend, collectives._gather_single) == originals
    return values


def test_it_ends_with_its_context() -> None:
    assert run_ranks(_sum_before_inside_and_after, 2) == [[2.0, 1.0, 2.0]] * 2
