"""Over data, tensor and pipeline ranks an optimizer does what it does on one (facts: DeepSpeed's
LAMB took the ratio of partitions, TorchTitan's clipping saw its own stage only)."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist

from megascale.config import OptimizerConfig
from megascale.optim import Reductions, build_optimizer
from megascale.topology import Mesh
from tests.distributed import run_ranks
from tests.optim.shards import Named, make_flats, masters, random_like, set_grads

OptimizerName = Literal["adamw", "lamb"]
STEPS = 5
SHAPES = {  # over TP: columns of `embed`, rows of the others; vectors and `positions` replicated
    "embed": (6, 4),
    "positions": (5, 3),
    "norm": (5,),
    "big": (22, 3),
    "head_norm": (3,),
    "out": (4, 5),
}
REPLICATED = ("positions", "norm", "head_norm")
STAGES = (("embed", "positions", "norm"), ("big", "embed", "head_norm", "out"))
PARAMS = random_like({n: torch.empty(s, dtype=torch.float64) for n, s in SHAPES.items()}, seed=0)


def _tensor_slice(params: Named, tp_rank: int, tensor: int) -> Named:
    return {
        n: p if n in REPLICATED else p.chunk(tensor, dim=1 if n == "embed" else 0)[tp_rank]
        for n, p in params.items()
    }


def _train(
    rank: int, _: int, name: OptimizerName, mesh: Mesh
) -> tuple[list[float], dict[str, list[float]]]:
    """(norms of all steps, this rank's masters after them)"""
    mine = {}
    for axis in ("tensor", "data", "pipeline"):
        for ranks in mesh.groups(axis):
            group = dist.new_group(ranks)
            if rank in ranks:
                mine[axis] = group
    at = mesh.coordinates(rank)
    stage = SHAPES if mesh.pipeline == 1 else STAGES[at.pp_rank]
    reductions = Reductions(
        tuple(stage),
        tied=("embed",) if mesh.pipeline > 1 else (),
        tp_rank=at.tp_rank,
        sum_over_data=lambda t: dist.all_reduce(t, group=mine["data"]),
        sum_over_tensor=lambda t: dist.all_reduce(t, group=mine["tensor"]),
        sum_over_pipeline=lambda t: dist.all_reduce(t, group=mine["pipeline"]),
    )

    def local(params: Named) -> Named:
        return _tensor_slice({n: params[n] for n in stage}, at.tp_rank, mesh.tensor)

    shard = {"dp_rank": at.dp_rank, "data": mesh.data}
    tied_copy = ("embed",) if at.pp_rank > 0 else ()
    flats = make_flats(local(PARAMS), **shard, replicated=REPLICATED, tied_copy=tied_copy)
    optimizer = build_optimizer(OptimizerConfig(name=name), flats, reductions)
    norms = []
    for step in range(STEPS):
        set_grads(flats, local(random_like(PARAMS, seed=step + 1)), **shard)
        norms.append(optimizer.step(1e-2, 0.5).norm.item())
    return norms, {n: v.tolist() for n, v in masters(flats).items()}


def _single(name: OptimizerName) -> tuple[list[float], Named]:
    flats = make_flats(PARAMS)
    optimizer = build_optimizer(OptimizerConfig(name=name), flats, Reductions(tuple(PARAMS)))
    norms = []
    for step in range(STEPS):
        set_grads(flats, random_like(PARAMS, seed=step + 1))
        norms.append(optimizer.step(1e-2, 0.5).norm.item())
    return norms, {n: v.reshape(SHAPES[n]) for n, v in masters(flats).items()}


@pytest.mark.parametrize("name", ["adamw", "lamb"])
@pytest.mark.parametrize(
    "mesh",
    [Mesh(data=2), Mesh(tensor=2), Mesh(tensor=2, data=2), Mesh(data=2, pipeline=2)],
    ids=str,
)
def test_equals_unsharded(name: OptimizerName, mesh: Mesh) -> None:
    expected_norms, expected = _single(name)
    results = run_ranks(_train, mesh.world_size, name, mesh)
    for norms, _ in results:
        assert norms == results[0][0], "ranks disagree on the norm"
        assert norms == pytest.approx(expected_norms, rel=1e-13)
    copies: dict[tuple[str, int], list[torch.Tensor]] = {}
    for pp_rank in range(mesh.pipeline):
        for tp_rank in range(mesh.tensor):
            stage = SHAPES if mesh.pipeline == 1 else STAGES[pp_rank]
            for n in stage:
                ranks = [
                    mesh.global_rank(tp_rank=tp_rank, dp_rank=d, pp_rank=pp_rank)
                    for d in range(mesh.data)
                ]
                whole = [value for r in ranks for value in results[r][1].get(n, [])]
                copies.setdefault((n, tp_rank), []).append(torch.tensor(whole, dtype=torch.float64))
    for (n, tp_rank), values in copies.items():
        want = _tensor_slice(expected, tp_rank, mesh.tensor)[n].flatten()
        torch.testing.assert_close(values[0], want, rtol=1e-12, atol=1e-12)
        for value in values[1:]:
            assert torch.equal(value, values[0]), f"copies of {n} on two stages differ"


def _one_bad_shard(rank: int, world_size: int) -> tuple[str | None, bool]:
    flats = make_flats(PARAMS, dp_rank=rank, data=world_size)
    reductions = Reductions(tuple(PARAMS), sum_over_data=dist.all_reduce)
    optimizer = build_optimizer(OptimizerConfig(), flats, reductions)
    before = [f.master.clone() for f in flats]
    grads = random_like(PARAMS, seed=1)
    grads["big"][-1, -1] = float("nan")  # an element that the last rank owns
    set_grads(flats, grads, dp_rank=rank, data=world_size)
    result = optimizer.step(1e-2)
    kept = all(torch.equal(a, f.master) for a, f in zip(before, flats, strict=True))
    return result.name_of_worst(), kept


def test_a_bad_shard_masks_and_is_named_on_every_rank() -> None:
    assert run_ranks(_one_bad_shard, 2) == [("big", True)] * 2
