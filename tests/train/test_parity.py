"""Every layout computes what one process computes: a pairwise cover of layouts and options.

In fp64 the gradient of each logical parameter at step 1 and the global gradient norms equal the
single process's within 1e-9; replicas of parameters stay bitwise equal after every step. In fp32
the loss of 20 steps agrees within 1e-5.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.train.cover import Case, pairwise
from tests.train.harness import Outcome, join, run_layout

SINGLE = {"tp": 1, "dp": 1, "pp": 1, "vp": 1, "zero": 1}
FACTORS: dict[str, list[Any]] = {
    "tp": [1, 2, 4],
    "dp": [1, 2, 4],
    "pp": [1, 2, 4],
    "vp": [1, 2],
    "zero": [1, 2],
    "overlap": [True, False],
    "mbs": [1, 2],
    "transfers": ["decoupled", "coupled"],
    "halves": [False, True],
    "joined": [1, 3],
    "family": ["gpt", "llama", "qwen"],
    "block": ["serial", "parallel"],
    "window": [None, 5],
    "tied": [False, True],
    "optimizer": ["adamw", "lamb"],
    "recompute": ["none", "selective", "full"],
    "dropout": [0.0, 0.1],
    "ragged": [False, True],
    "vocab": [256, 50257],
}
LAYOUT = ("tp", "dp", "pp", "vp", "zero")
FAMILY = {
    "gpt": "model.norm=layernorm model.activation=gelu model.position=learned model.bias=all",
    "llama": "model.norm=rmsnorm model.activation=swiglu model.position=rope model.bias=none "
    "model.num_heads=8 model.num_kv_heads=4",
    "qwen": "model.norm=rmsnorm model.activation=swiglu model.bias=qkv model.qk_norm=true",
}


def _feasible(case: Case) -> bool:
    ranks = case["tp"] * case["dp"] * case["pp"]
    return (
        1 < ranks <= 8
        and (case["vp"] == 1 or case["pp"] > 1)
        and not (case["family"] == "qwen" and case["block"] == "parallel")
        and 8 // (case["dp"] * case["mbs"]) >= case["pp"]
    )


ALL_THREE = {
    "tp": 2,
    "dp": 2,
    "pp": 2,
    "vp": 2,
    "zero": 2,
    "overlap": True,
    "mbs": 1,
    "transfers": "decoupled",
    "halves": True,
    "joined": 1,
    "family": "gpt",
    "block": "parallel",
    "window": 5,
    "tied": True,
    "optimizer": "lamb",
    "recompute": "selective",
    "dropout": 0.1,
    "ragged": True,
    "vocab": 256,
}
CASES = pairwise(FACTORS, _feasible, first=[ALL_THREE])


def _overrides(case: Case) -> tuple[str, ...]:
    """Everything but the layout. A collective of gloo costs a millisecond: no layer too many."""
    settings = [
        f"model.num_layers={max(4, case['pp'] * case['vp'])}",
        *FAMILY[case["family"]].split(),
        f"model.block={case['block']}",
        f"model.tie_embeddings={str(case['tied']).lower()}",
        f"optimizer.name={case['optimizer']}",
        f"activation_checkpoint.mode={case['recompute']}",
        f"model.hidden_dropout={case['dropout']}",
        f"model.attention_dropout={case['dropout']}",
        f"model.vocab_size={case['vocab']}",
    ]
    if case["window"]:
        settings.append(f"model.attention_window={case['window']}")
    return tuple(settings)


@cache
def _reference(overrides: tuple[str, ...], num_steps: int, ragged: bool) -> Outcome:
    return run_layout(SINGLE, list(overrides), num_steps, ragged=ragged)[0]


def _name(case: Case) -> str:
    return "-".join(f"{key}{value}" for key, value in case.items())


def test_the_cover_is_short() -> None:
    assert len(CASES) <= 40


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_gradients_equal_one_process(case: Case) -> None:
    options = (*_overrides(case), "training.dtype=float64")
    layout = {key: case[key] for key in LAYOUT}
    execution = [
        f"parallelism.pipeline_transfers={case['transfers']}",
        f"parallelism.join_weight_gradients={case['joined']}",
        f"parallelism.overlap_grad_reduce={str(case['overlap']).lower()}",
        f"parallelism.overlap_param_gather={str(case['overlap']).lower()}",
        f"training.micro_batch_size={case['mbs']}",
    ]
    if case["halves"]:
        name = "interleaved_zb" if case["vp"] > 1 else "zb_h1"
        execution.append(f"parallelism.pipeline_schedule={name}")
    outcomes = run_layout(layout, [*options, *execution], 3, ragged=case["ragged"])
    reference = _reference(options, 3, case["ragged"])
    expected, got = join([reference]), join(outcomes)
    assert got.keys() == expected.keys()
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        # The gradient of a key bias is zero (softmax ignores a shift): there only noise differs.
        scale = max(np.abs(gradient).max(), 1e-6 * largest)
        worst = np.abs(got[name] - gradient).max()
        assert worst <= 1e-9 * scale, f"{name}: off by {worst} of {scale}"
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.norms, reference.norms, rtol=1e-9)
        np.testing.assert_allclose(outcome.losses, reference.losses, rtol=1e-9)
    _assert_replicas_equal(outcomes)
    if case["tied"] and case["pp"] > 1:
        _assert_stages_hold_the_same_embedding(outcomes)


def _assert_replicas_equal(outcomes: list[Outcome]) -> None:
    by_shard: dict[tuple[int, int], list[list[bytes]]] = {}
    for outcome in outcomes:
        tp_rank, _, pp_rank = outcome.coordinates
        expected = by_shard.setdefault((tp_rank, pp_rank), outcome.parameter_hashes)
        assert outcome.parameter_hashes == expected, f"replicas of {outcome.coordinates} differ"


def _assert_stages_hold_the_same_embedding(outcomes: list[Outcome]) -> None:
    for tp_rank in range(1 + max(o.coordinates[0] for o in outcomes)):
        held = [o.tied_hashes for o in outcomes if o.coordinates[0] == tp_rank and o.tied_hashes]
        assert len(held) >= 2, "the first and the last stage hold the embedding"
        assert all(hashes == held[0] for hashes in held), f"tensor rank {tp_rank}: stages differ"


LONG = [
    {"tp": 2, "dp": 2, "pp": 1, "vp": 1, "zero": 1},
    {"tp": 1, "dp": 2, "pp": 2, "vp": 2, "zero": 2},
    {"tp": 2, "dp": 2, "pp": 2, "vp": 1, "zero": 2},
]


@pytest.mark.full
@pytest.mark.parametrize("layout", LONG, ids=str)
@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 0.002), ("lamb", 0.01)])
def test_losses_of_twenty_steps_equal_one_process(
    layout: dict[str, int], optimizer: str, lr: float
) -> None:
    num_layers = layout["pp"] * max(2, layout["vp"])
    sizes = (f"model.num_layers={num_layers}", "training.micro_batch_size=2")
    common = (f"optimizer.name={optimizer}", *sizes)
    options = (*common, f"optimizer.lr={lr}")
    reference = _reference(options, 20, False)
    unmoved = _reference((*common, "optimizer.lr=1e-9"), 20, False)
    moved = np.abs(np.subtract(reference.losses, unmoved.losses)).max()
    assert moved > 3e-3, "what was learnt must show in the losses, far above the tolerance"
    for outcome in run_layout(layout, list(options), 20):
        np.testing.assert_allclose(outcome.losses, reference.losses, rtol=1e-5)
