"""Calibration's measurements on a CPU, at sizes of nothing: what is measured, and that wrong values
are refused. The figures themselves come from GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megascale.errors import ConfigError
from megascale.ops import linear
from megascale.ops.weight_gradient import add_weight_gradient
from megascale.plan.machine.load import load_cluster
from megascale.plan.machine.write import write_cluster
from megascale.plan.work.operations import Direction
from megascale.train.calibrate import compute, links
from megascale.train.calibrate.grid import FULL, Grid
from megascale.train.calibrate.rank import Budget, measure
from megascale.train.calibrate.start import start_calibration
from tests.distributed import run_ranks

TINY = Grid(
    hidden=(64,),
    tensor=(1, 2),
    tokens=(32, 64),
    head_dims=(16,),
    seq_lens=(64,),
    attention_heads=(4,),
    window_seq_lens=(64,),
    pass_bytes=(2**16,),
    transfer_bytes=(2**12,),
)
CPU = torch.device("cpu")


def test_everything_is_measured_once_and_makes_a_cluster(tmp_path: Path) -> None:
    said: list[str] = []
    samples = measure(TINY, Budget(60.0, None, CPU), said.append)
    sizes = [(s.rows, s.columns, s.depth, s.direction) for s in samples.gemm]
    assert len(sizes) == len(set(sizes)) == len(TINY.gemms())
    assert {s.backward for s in samples.attention} == {True, False}
    assert {s.name for s in samples.memory} == {
        "copy",
        "norm",
        "norm_backward",
        "activation",
        "activation_backward",
        "adamw",
    }
    assert said[-1] == "attention"
    file = tmp_path / "here.toml"
    write_cluster(file, samples.model_copy(update={"device": "NVIDIA H200"}), 1, 1)
    cluster = load_cluster(str(file))
    assert cluster.device.launch_s == pytest.approx(samples.launch_s, rel=1e-3)


def test_no_sample_begins_behind_the_budget() -> None:
    samples = measure(TINY, Budget(0.0, None, CPU), lambda _: None)
    assert samples.gemm == ()
    assert samples.attention == ()
    assert samples.memory  # what is quick is measured anyway


def test_the_full_grid_has_what_layers_are_made_of() -> None:
    sizes = {(g.rows, g.columns, g.depth) for g in FULL.gemms() if g.direction is Direction.FORWARD}
    # FC1 and FC2 of the 175B at TP 8, a sequence of 2,048 tokens
    assert (2048, 6144, 12288) in sizes
    assert (2048, 12288, 6144) in sizes
    flops = [g.flops for g in FULL.gemms()]
    assert max(flops) <= 1.2e13
    assert sum(flops) * 20 / 600e12 < 200  # seconds of an H200, all calls


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = add_weight_gradient

    def wrong(main: torch.Tensor, *pairs: object, overwrite: bool) -> None:
        right(main, *pairs, overwrite=overwrite)  # type: ignore[arg-type]
        main.mul_(1.1)

    monkeypatch.setattr(linear, "add_weight_gradient", wrong)
    with pytest.raises(AssertionError, match="relative error"):
        compute.measure_gemms(TINY.gemms(), compute.Stopwatch(CPU), lambda: True)


def _two_ranks(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    samples = links.measure_collectives([2**12], group, CPU)
    found = {(str(s.transfer), s.ranks, s.num_bytes) for s in samples}
    names = ("all_gather", "reduce_scatter", "all_reduce", "send")
    assert found == {(name, world_size, 2**12) for name in names}
    slowest = [s.seconds for s in samples]
    everywhere: list[list[float]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everywhere, slowest)
    assert everywhere[0] == everywhere[1]  # the maximum over ranks


def test_collectives_of_two_ranks() -> None:
    run_ranks(_two_ranks, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs says")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shows none"):
        start_calibration(tmp_path / "x.toml", nproc=None, quick=True, budget_s=1.0)


@pytest.mark.parametrize(
    ("output", "nproc", "says"),
    [("x.toml", 3, "use 1 to 2"), ("x.json", 1, "NAME.toml"), ("no/x.toml", 1, "cannot be")],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, nproc: int, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=says):
        start_calibration(tmp_path / output, nproc=nproc, quick=True, budget_s=1.0)
