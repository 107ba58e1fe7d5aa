"""LAMB on flats equals You et al.'s algorithm written plainly on whole parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megascale.config import OptimizerConfig
from megascale.optim import Reductions, build_optimizer
from tests.optim.shards import Named, make_flats, masters, random_like, set_grads

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (3, 11), "norm.weight": (5,)}
PARAMS = random_like({n: torch.empty(s, dtype=torch.float64) for n, s in SHAPES.items()}, seed=0)


class PlainLamb:
    """Algorithm 2 of 1904.00962, after clipping by the global norm, one parameter at a time."""

    def __init__(self, cfg: OptimizerConfig, params: Named) -> None:
        self.cfg, self.params, self.step_count = cfg, {n: p.clone() for n, p in params.items()}, 0
        self.m = {n: torch.zeros_like(p) for n, p in params.items()}
        self.v = {n: torch.zeros_like(p) for n, p in params.items()}

    def step(self, lr: float, grads: Named) -> Tensor:
        cfg = self.cfg
        self.step_count += 1
        norm: Tensor = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.values()]))
        for name, w in self.params.items():
            g = grads[name] * min(1.0, cfg.clip_grad / (norm.item() + 1e-6))
            self.m[name] = cfg.beta1 * self.m[name] + (1 - cfg.beta1) * g
            self.v[name] = cfg.beta2 * self.v[name] + (1 - cfg.beta2) * g * g
            m_hat = self.m[name] / (1 - cfg.beta1**self.step_count)
            v_hat = self.v[name] / (1 - cfg.beta2**self.step_count)
            update, ratio = m_hat / (v_hat.sqrt() + cfg.eps), 1.0
            if w.dim() > 1:
                update = update + cfg.weight_decay * w
                if w.norm() > 0 and update.norm() > 0:
                    ratio = (w.norm() / update.norm()).item()
            w -= lr * ratio * update
        return norm


@pytest.mark.parametrize("clip_grad", [1.0, 1e9])
def test_equals_the_plain_algorithm(clip_grad: float) -> None:
    cfg = OptimizerConfig(name="lamb", clip_grad=clip_grad, weight_decay=0.1)
    flats = make_flats(PARAMS)
    optimizer = build_optimizer(cfg, flats, Reductions(tuple(PARAMS)))
    plain = PlainLamb(cfg, PARAMS)
    for step in range(10):
        grads = random_like(PARAMS, seed=step + 1)
        set_grads(flats, {n: g * 4 for n, g in grads.items()})
        norm = optimizer.step(1e-2 / (step + 1), torch.tensor(0.25)).norm
        torch.testing.assert_close(norm, plain.step(1e-2 / (step + 1), grads), rtol=1e-14, atol=0)
    for name, value in masters(flats).items():
        expected = plain.params[name].flatten()
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_ratio_is_one_where_a_norm_is_zero() -> None:
    """Zero weights move by the bare Adam update; zero gradients on zero weights do not move."""
    cfg = OptimizerConfig(name="lamb", eps=1e-12, clip_grad=0.0)
    flats = make_flats({"w": torch.zeros(2, 2), "still": torch.zeros(2, 2)})
    optimizer = build_optimizer(cfg, flats, Reductions(("w", "still")))
    set_grads(flats, {"w": torch.full((2, 2), 0.5), "still": torch.zeros(2, 2)})
    optimizer.step(1e-2)
    torch.testing.assert_close(masters(flats)["w"], torch.full((4,), -1e-2))
    assert torch.equal(masters(flats)["still"], torch.zeros(4))
