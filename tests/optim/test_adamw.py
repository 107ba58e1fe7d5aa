"""AdamW on flats equals torch's on whole parameters; a non-finite step changes no bit."""

from __future__ import annotations

import inspect
from typing import Literal

import pytest
import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megascale.config import OptimizerConfig
from megascale.optim import Flat, Optimizer, Reductions, Segment, build_optimizer
from tests.optim.shards import make_flats, masters, random_like, set_grads

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (3, 11), "norm.weight": (5,)}
PARAMS = random_like({n: torch.empty(s, dtype=torch.float64) for n, s in SHAPES.items()}, seed=0)
NAMES = tuple(PARAMS)


@pytest.mark.parametrize("clip_grad", [0.0, 1.0, 1e9])
def test_equals_torch_adamw(clip_grad: float) -> None:
    cfg = OptimizerConfig(clip_grad=clip_grad, weight_decay=0.1)
    flats = make_flats(PARAMS)
    optimizer = build_optimizer(cfg, flats, Reductions(NAMES))
    theirs = {n: p.clone().requires_grad_() for n, p in PARAMS.items()}
    groups = [
        {"params": [p for p in theirs.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps)
    for step in range(10):
        lr, grads = 1e-2 / (step + 1), random_like(PARAMS, seed=step + 1)
        set_grads(flats, grads)
        result = optimizer.step(lr, torch.tensor(0.5, dtype=torch.float64))
        for name, p in theirs.items():
            p.grad = grads[name] * 0.5
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip_grad or float("inf"))
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        torch.testing.assert_close(result.norm, norm, rtol=1e-14, atol=0)
    for name, value in masters(flats).items():
        torch.testing.assert_close(value, theirs[name].detach().flatten(), rtol=1e-12, atol=1e-12)
    assert optimizer.step_count == 10


@pytest.mark.parametrize("name", ["adamw", "lamb"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nonfinite_step_changes_no_bit(
    name: Literal["adamw", "lamb"], bad: float, dtype: torch.dtype
) -> None:
    params = {n: p.to(dtype) for n, p in PARAMS.items()}
    params["a.weight"][0, 0] = -0.0  # a sum with a masked update of 0 would lose the sign
    flats = make_flats(params)
    optimizer = build_optimizer(OptimizerConfig(name=name), flats, Reductions(NAMES))

    def bits() -> list[bytes]:
        tensors = [f.master for f in flats] + optimizer.exp_avg + optimizer.exp_avg_sq
        return [t.numpy().tobytes() for t in [*tensors, optimizer.step_count]]

    grads = random_like(params, seed=1)
    grads["a.weight"][0, 0] = -0.0
    for _ in range(2):
        before = bits()
        set_grads(flats, {**grads, "b.weight": torch.full_like(grads["b.weight"], bad)})
        result = optimizer.step(1e-2)
        assert result.found_inf == 1
        assert not result.norm.isfinite()
        assert result.name_of_worst() == "b.weight"
        assert bits() == before
        set_grads(flats, grads)
        result = optimizer.step(1e-2)
        assert result.found_inf == 0
        assert result.name_of_worst() is None
        assert bits() != before
    assert optimizer.step_count == 2


def test_a_nonfinite_scale_masks_the_step() -> None:
    flats = make_flats(PARAMS)
    optimizer = build_optimizer(OptimizerConfig(), flats, Reductions(NAMES))
    set_grads(flats, random_like(PARAMS, seed=1))
    result = optimizer.step(1e-2, torch.tensor(1.0) / 0)  # a batch without a valid token
    assert result.found_inf == 1
    assert result.name_of_worst() is None
    torch.testing.assert_close(masters(flats)["b.weight"], PARAMS["b.weight"].flatten())


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_the_rate_may_be_a_tensor(name: Literal["adamw", "lamb"]) -> None:
    after = []
    for lr in (0.25, torch.tensor(0.25)):
        flats = make_flats(PARAMS)
        optimizer = build_optimizer(OptimizerConfig(name=name), flats, Reductions(NAMES))
        set_grads(flats, random_like(PARAMS, seed=1))
        optimizer.step(lr)
        after.append(flats)
    for a, b in zip(*after, strict=True):
        assert torch.equal(a.master, b.master)


def test_state_restores_exactly() -> None:
    def fresh() -> tuple[list[Flat], Optimizer]:
        flats = make_flats(PARAMS)
        return flats, build_optimizer(OptimizerConfig(), flats, Reductions(NAMES))

    flats, optimizer = fresh()
    other_flats, other = fresh()
    for step in range(4):
        if step == 2:  # the other one resumes here
            for key, tensors in optimizer.state().items():
                for mine, theirs in zip(other.state()[key], tensors, strict=True):
                    mine.copy_(theirs)
            other.step_count.copy_(optimizer.step_count)
            for resumed, flat in zip(other_flats, flats, strict=True):
                resumed.master.copy_(flat.master)
        for target, stepped in ((flats, optimizer), (other_flats, other)):
            set_grads(target, random_like(PARAMS, seed=step))
            if stepped is optimizer or step >= 2:
                stepped.step(1e-2)
    for resumed, flat in zip(other_flats, flats, strict=True):
        assert torch.equal(resumed.master, flat.master)


def test_a_name_in_several_segments_and_a_rank_without_elements() -> None:
    grad = torch.tensor([3.0, 4.0, 12.0])
    master = torch.ones(3)
    halves = [Segment("w", master[i:j], grad[i:j], True) for i, j in ((0, 1), (1, 3))]
    empty = Flat(torch.empty(0), torch.empty(0), False, [])
    flats = [Flat(master, grad, True, halves), empty]
    optimizer = build_optimizer(OptimizerConfig(), flats, Reductions(("v", "w")))
    result = optimizer.step(1e-2)
    assert result.norm.item() == pytest.approx(13.0, rel=1e-15)
    assert result.squared.tolist() == pytest.approx([0.0, 169.0], rel=1e-15)
    alone = build_optimizer(OptimizerConfig(name="lamb"), [empty], Reductions(("v", "w")))
    assert alone.step(1e-2).norm == 0.0
    assert alone.step_count == 1


def test_flats_refuse_segments_that_do_not_tile_them() -> None:
    t = torch.zeros(4)
    with pytest.raises(AssertionError, match="differ in size"):
        Flat(t, t, True, [Segment("w", t[:3], t[:3], True)])
    with pytest.raises(AssertionError, match="decay rule"):
        Flat(t, t, True, [Segment("w", t, t, False)])


def test_torch_still_has_what_we_rely_on() -> None:
    """Hardly public: the functional fused optimizers with a mask, and a norm of many tensors."""
    for function in (adamw, sgd):
        assert {"fused", "found_inf", "lr"} <= set(inspect.signature(function).parameters)
    norms = torch._foreach_norm([torch.tensor([3.0, 4.0]), torch.empty(0)], 2, dtype=torch.float64)
    assert [n.item() for n in norms] == [5.0, 0.0]
    assert norms[0].dtype == torch.float64
