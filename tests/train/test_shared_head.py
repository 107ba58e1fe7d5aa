"""A head that pipeline stages share computes what one process computes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from megascale.config import load_config, parse_config
from megascale.errors import ConfigError
from megascale.plan.memory import predict_memory
from megascale.topology import Mesh
from megascale.train.assemble import assemble
from megascale.train.step import validation_loss
from tests.distributed import run_ranks
from tests.train.harness import TINY, Outcome, join, make_loader, read, run_layout

pytestmark = pytest.mark.full

SINGLE = {"tp": 1, "dp": 1, "pp": 1, "vp": 1, "zero": 1}
SHARED = ["parallelism.share_head=true"]
ZB, JOINED = "parallelism.pipeline_schedule=interleaved_zb", "parallelism.join_weight_gradients=3"
CASES = [
    # layout; execution; what else differs from the tiny model
    ({"tp": 1, "dp": 1, "pp": 2, "vp": 2, "zero": 1}, [], ["model.vocab_size=1003"]),
    ({"tp": 2, "dp": 2, "pp": 2, "vp": 2, "zero": 2}, [ZB], ["optimizer.name=lamb"]),
    ({"tp": 2, "dp": 1, "pp": 2, "vp": 2, "zero": 1}, [JOINED], ["model.norm=layernorm"]),
    (
        {"tp": 1, "dp": 2, "pp": 2, "vp": 4, "zero": 1},
        [ZB, JOINED],
        ["activation_checkpoint.mode=selective", "optimizer.name=lamb"],
    ),
    (
        {"tp": 1, "dp": 1, "pp": 4, "vp": 2, "zero": 1},
        [],
        ["activation_checkpoint.mode=full", "model.hidden_dropout=0.1"],
    ),
]


@cache
def _reference(overrides: tuple[str, ...]) -> Outcome:
    return run_layout(SINGLE, list(overrides), 3, ragged=True)[0]


@pytest.mark.parametrize(("layout", "execution", "model"), CASES, ids=str)
def test_gradients_equal_one_process(
    layout: dict[str, int], execution: list[str], model: list[str]
) -> None:
    num_layers = f"model.num_layers={layout['pp'] * layout['vp']}"
    options = ("training.dtype=float64", num_layers, *model)
    outcomes = run_layout(layout, [*options, *SHARED, *execution], 3, ragged=True)
    reference = _reference(options)
    expected, got = join([reference]), join(outcomes)  # which refuses gaps and overlaps
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        worst = np.abs(got[name] - gradient).max()
        assert worst <= 1e-9 * np.abs(gradient).max(), name
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.norms, reference.norms, rtol=1e-9)
        np.testing.assert_allclose(outcome.losses, reference.losses, rtol=1e-9)


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("execution", [[], [ZB], [ZB, JOINED]], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 5e-3)])
def test_two_gpus_equal_one(execution: list[str], dtype: str, tolerance: float) -> None:
    shape = ["model.hidden_size=256", "model.ffn_hidden_size=512", "training.seq_len=128"]
    options = [*shape, "training.device=cuda", "optimizer.lr=0.002", f"training.dtype={dtype}"]
    layout = {"tp": 1, "dp": 1, "pp": 2, "vp": 2, "zero": 1}
    reference = run_layout(SINGLE, options, 5)[0]
    for outcome in run_layout(layout, [*options, *SHARED, *execution], 5):
        np.testing.assert_allclose(outcome.losses, reference.losses, rtol=tolerance)
        np.testing.assert_allclose(outcome.norms, reference.norms, rtol=100 * tolerance)


def _validate(rank: int, world_size: int, overrides: list[str]) -> float:
    config = load_config(None, [*TINY, *overrides])
    assembly = assemble(config, config.mesh(world_size), torch.device("cpu"))
    loader = make_loader(config, 0, 1)
    batches = [read(config, loader, step, ragged=True).micro_batches for step in range(2)]
    return validation_loss(assembly, batches)


def test_validation_equals_one_process() -> None:
    options = ["training.dtype=float64", "training.global_batch_size=6"]
    layout = ["parallelism.pipeline_parallel_size=2", "parallelism.virtual_pipeline_size=2"]
    expected = run_ranks(_validate, 1, options)[0]
    found = run_ranks(_validate, 2, [*options, *layout, *SHARED])
    assert found == pytest.approx([expected] * 2, rel=1e-12)


def test_every_stage_holds_a_part() -> None:
    layout = {"tp": 1, "dp": 1, "pp": 2, "vp": 2, "zero": 1}
    outcomes = run_layout(layout, ["training.dtype=float64", *SHARED], 1)
    rows = [
        sum(values.shape[0] for name, _, _, values in outcome.gradients if name == "head.weight")
        for outcome in outcomes
    ]
    assert rows == [128, 128]


def test_memory_counts_a_part_on_every_stage() -> None:
    changes = [
        "parallelism.pipeline_parallel_size=2",
        "parallelism.virtual_pipeline_size=2",
    ]
    plain, shared = (load_config(None, [*TINY, *changes, *more]) for more in ([], SHARED))
    mesh = Mesh(pipeline=2)
    parameters = [
        [predict_memory(config, mesh, stage).parameter_bytes for stage in range(2)]
        for config in (plain, shared)
    ]
    half = 4 * 32 * 256 // 2
    assert parameters[1] == [parameters[0][0] + half, parameters[0][1] - half]
    logits = [[predict_memory(c, mesh, s).logits_bytes for s in range(2)] for c in (plain, shared)]
    assert logits[0] == [0, 2 * logits[1][1]]
    assert logits[1][0] == logits[1][1] > 0


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        ({}, "without a pipeline"),
        ({"pipeline_parallel_size": 2}, "needs an interleaved schedule, got '1f1b'"),
        (
            {
                "pipeline_parallel_size": 2,
                "virtual_pipeline_size": 2,
                "pipeline_transfers": "coupled",
            },
            "with coupled transfers",
        ),
        ({"pipeline_parallel_size": 8, "virtual_pipeline_size": 2}, "up to 4 can share it"),
    ],
)
def test_layouts_that_cannot_share_are_refused(
    parallelism: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"parallelism": {"share_head": True, **parallelism}})


def test_tied_embeddings_are_refused() -> None:
    layout = {"share_head": True, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
    with pytest.raises(ConfigError, match=r"share_head is true with model\.tie_embeddings"):
        parse_config({"model": {"tie_embeddings": True}, "parallelism": layout})
