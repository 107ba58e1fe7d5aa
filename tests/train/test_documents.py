"""Training inside documents: the same losses in every layout, other ones than without the mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.config import load_config
from megascale.train.assemble import assemble
from megascale.train.corpus import make_loader
from megascale.train.step import train_step
from tests.distributed import run_ranks
from tests.shared import shared_folder
from tests.train.harness import TINY
from tests.train.runs import SINGLE, Layout, curve, metrics, samples, train
from tests.train.test_mixture import setting, write_parts

LAYOUTS: dict[str, Layout] = {
    "tp2": {"tp": 2, "dp": 1, "pp": 1},
    "pp2": {"tp": 1, "dp": 1, "pp": 2},
    "dp2": {"tp": 1, "dp": 2, "pp": 1},
}
MODELS = {
    "learned-parallel": ["model.position=learned", "model.block=parallel"],
    "rope-window": ["model.attention_window=6", "model.num_kv_heads=2"],
}
STEPS = 20
RTOL = 1e-5  # fp32 on other ranks adds in another order


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "mixture-parts", write_parts)


def documents_of_a_mixture(parts: Path, model: str) -> list[str]:
    return [
        "data.synthetic=false",
        setting((parts / "prose", 0.6), (parts / "code", 0.4)),
        "model.vocab_size=280",
        "model.num_layers=4",
        "model.attention_dropout=0.1",
        "training.seq_len=32",
        "training.global_batch_size=4",
        f"training.steps={STEPS}",
        "optimizer.lr=0.002",
        "data.document_mask=true",
        *MODELS[model],
    ]


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_has_the_same_losses(tmp_path: Path, parts: Path, model: str) -> None:
    options = documents_of_a_mixture(parts, model)
    train(tmp_path / "single", SINGLE, options)
    expected = curve(tmp_path / "single")
    assert len(expected) == STEPS
    assert expected[STEPS][0] < expected[1][0] - 0.5
    for name, layout in LAYOUTS.items():
        train(tmp_path / name, layout, options)
        got = curve(tmp_path / name)
        assert list(got) == list(expected)
        losses, wanted = (
            {step: loss for step, (loss, _) in points.items()} for points in (got, expected)
        )
        assert losses == pytest.approx(wanted, rel=RTOL), name
    train(tmp_path / "unmasked", SINGLE, [*options, "data.document_mask=false"])
    assert abs(curve(tmp_path / "unmasked")[1][0] / expected[1][0] - 1) > 10 * RTOL


@pytest.mark.parametrize("layout", ["dp2", pytest.param("pp2", marks=pytest.mark.full)])
def test_a_mixture_goes_on_with_the_next_sample_in_any_layout(
    tmp_path: Path, parts: Path, layout: str
) -> None:
    """Killed between checkpoints and resumed elsewhere: the samples of an undisturbed run."""
    options = [
        *documents_of_a_mixture(parts, "rope-window"),
        "training.steps=8",
        "checkpoint.interval=3",
        "validation.interval=4",
        "validation.batches=2",
    ]
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, SINGLE, options)
    train(run, SINGLE, options, kill_after=5)
    assert train(run, LAYOUTS[layout], options, resume=True) == [None, None]
    assert samples(run) == samples(whole)
    assert list(_validation(run)) == [4, 8]
    assert _validation(run) == pytest.approx(_validation(whole), rel=RTOL)
    other = setting((parts / "prose", 0.5), (parts / "code", 0.5))
    (error, *_) = train(run, SINGLE, [*options, other, "training.steps=9"], resume=True)
    assert error is not None
    assert "data of mixture '3/5 of" in error
    (error, *_) = train(run, SINGLE, [*options, "data.document_mask=false"], resume=True)
    assert error is not None
    assert "was trained with data.document_mask True, this run has False" in error


def _validation(run: Path) -> dict[int, float]:
    return {
        line["step"]: line["validation_loss"] for line in metrics(run) if "validation_loss" in line
    }


def _losses(rank: int, world_size: int, settings: list[str]) -> list[float]:
    """Of five steps; on a GPU a wait is an error once three have compiled and allocated."""
    config = load_config(None, settings)
    on_gpu = config.training.device == "cuda"
    mesh, device = config.mesh(world_size), torch.device("cuda" if on_gpu else "cpu")
    assembly = assemble(config, mesh, device)
    loader = make_loader(config, mesh, assembly.groups.coordinates, 0)
    outcomes = []
    for number in range(5):
        batch = next(loader)
        if on_gpu and number == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            outcomes.append(
                train_step(assembly, batch.micro_batches, global_batch=batch.num_samples, lr=0.002)
            )
        finally:
            if on_gpu and number == 4:
                torch.cuda.set_sync_debug_mode("default")
    loader.close()
    return [outcome.summary.read()[0] for outcome in outcomes]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_a_gpu_has_the_losses_of_the_cpu_and_waits_for_nothing(
    parts: Path, model: str, dtype: str, tolerance: float
) -> None:
    settings = [*TINY, *documents_of_a_mixture(parts, model), "model.attention_dropout=0"]
    gpu = ["training.device=cuda", f"training.dtype={dtype}", "model.hidden_size=64"]
    (expected,) = run_ranks(_losses, 1, [*settings, "model.hidden_size=64"])
    (found,) = run_ranks(_losses, 1, [*settings, *gpu], timeout_s=280, cuda=True)
    assert found == pytest.approx(expected, rel=tolerance)
