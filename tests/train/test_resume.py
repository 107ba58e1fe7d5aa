"""A resumed run is the run that was never interrupted.

In the same layout losses, gradient norms, parameters and moments are the same bits; in another
layout losses agree within 1e-5. Samples are the same in all cases. All runs are killed by SIGKILL
between checkpoints, so that steps are replayed too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.flux.collectives import Pending
from megascale.parallel.buckets import Bucket
from megascale.train.loop import Loop
from tests.shared import shared_folder
from tests.train.runs import (
    SINGLE,
    Layout,
    assert_same_bits,
    checkpoints,
    curve,
    metrics,
    samples,
    train,
)

LAYOUTS: dict[str, Layout] = {
    "single": SINGLE,
    "tp2-dp2-zero2": {"tp": 2, "dp": 2, "pp": 1, "zero": 2},
    "pp2-vp2": {"tp": 1, "dp": 1, "pp": 2, "vp": 2},
    "dp4": {"tp": 1, "dp": 4, "pp": 1},
    "dp2": {"tp": 1, "dp": 2, "pp": 1},
    "tp2": {"tp": 2, "dp": 1, "pp": 1},
    "pp2": {"tp": 1, "dp": 1, "pp": 2},
    "tp2-pp2-vp2": {"tp": 2, "dp": 1, "pp": 2, "vp": 2},
}
SMALL = [
    "model.num_layers=4",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "training.global_batch_size=4",
    "training.steps=8",
    "optimizer.lr=0.002",
    "checkpoint.interval=4",
    'checkpoint.async_mode="off"',  # so that who is killed after a save has it
]
Make = Callable[[str, str], Path]


def _options(optimizer: str) -> list[str]:
    return [*SMALL, f"optimizer.name={optimizer}"]


def _once(
    make: Callable[[Path, str, str], Any], factory: pytest.TempPathFactory, what: str
) -> Make:
    """`make(folder, layout, optimizer)` on the first request; its folder on all."""

    def folder_of(layout: str, optimizer: str) -> Path:
        name = f"resume-{what}-{layout}-{optimizer}"
        return shared_folder(factory, name, lambda folder: make(folder, layout, optimizer))

    return folder_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A folder with 8 steps in one go."""

    def make(folder: Path, layout: str, optimizer: str) -> None:
        train(folder, LAYOUTS[layout], _options(optimizer))

    return _once(make, tmp_path_factory, "whole")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A folder whose run was killed after step 6, with a checkpoint of step 4."""

    def make(folder: Path, layout: str, optimizer: str) -> None:
        train(folder, LAYOUTS[layout], _options(optimizer), kill_after=6)
        assert checkpoints(folder) == ["step-00000004"]

    return _once(make, tmp_path_factory, "killed")


def _copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "run"))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("layout", ["single", "tp2-dp2-zero2", "pp2-vp2"])
def test_same_layout_same_bits(
    whole: Make, killed: Make, tmp_path: Path, layout: str, optimizer: str
) -> None:
    run, expected = _copy(killed(layout, optimizer), tmp_path), whole(layout, optimizer)
    assert max(curve(run)) == 5  # the values of step 6 died with the process
    train(run, LAYOUTS[layout], _options(optimizer), resume=True)
    steps = [line["step"] for line in metrics(run)]
    assert steps == [*range(1, 6), *range(5, 9)]  # nothing but 5 was done twice
    assert curve(run) == curve(expected)
    assert_same_bits(run, expected)
    assert samples(run) == samples(expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "then"),
    [("tp2-dp2-zero2", "pp2"), ("dp4", "tp2"), ("single", "tp2-pp2-vp2"), ("pp2-vp2", "single")],
)
def test_other_layout_same_curve(
    whole: Make, killed: Make, tmp_path: Path, first: str, then: str
) -> None:
    run, expected = _copy(killed(first, "adamw"), tmp_path), whole("single", "adamw")
    before = curve(run)
    (run / "metrics.jsonl").unlink()  # replayed steps are close here, not equal
    train(run, LAYOUTS[then], _options("adamw"), resume=True)
    after = curve(run)
    assert list(after) == list(range(5, 9))
    got = [(before | after)[step][0] for step in range(1, 9)]
    want = [curve(expected)[step][0] for step in range(1, 9)]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert samples(run) == samples(expected)


@pytest.mark.full
def test_three_resumes_in_a_row(whole: Make, tmp_path: Path) -> None:
    run, layout = tmp_path / "run", LAYOUTS["dp2"]
    options = [*_options("adamw"), "checkpoint.interval=2"]
    for kill_after in (3, 4, 6):
        train(run, layout, options, resume=run.exists(), kill_after=kill_after)
    train(run, layout, options, resume=True)
    expected = whole("dp2", "adamw")
    assert curve(run) == curve(expected)
    assert_same_bits(run, expected)
    assert samples(run) == samples(expected)


@dataclass
class _Late:
    """A gather of initial values that arrives when somebody waits for it, not before."""

    bucket: Bucket
    pending: Pending

    def wait(self) -> None:
        self.pending.wait()
        self.bucket.parameters.fill_(123.0)


def _delay_the_gathers(rank: Loop) -> None:
    zero = rank.assembly.zero
    pending = zero._gathers._pending
    for bucket in zero.buckets:
        pending[bucket.name] = _Late(bucket, pending[bucket.name])  # type: ignore[assignment]


@pytest.mark.full
def test_what_was_sent_before_does_not_overwrite_what_was_loaded(
    whole: Make, killed: Make, tmp_path: Path
) -> None:
    run = _copy(killed("dp2", "adamw"), tmp_path)
    options = _options("adamw")
    train(run, LAYOUTS["dp2"], options, resume=True, plant=_delay_the_gathers)
    assert_same_bits(run, whole("dp2", "adamw"))


@pytest.mark.full
def test_batch_ramp_up_goes_on_where_it_was(tmp_path: Path) -> None:
    options = [
        *_options("adamw"),
        "training.steps=20",
        "checkpoint.interval=10",
        "training.global_batch_size=8",
        "training.batch_ramp_up={start=2, increment=2, samples=40}",
    ]
    train(tmp_path / "whole", LAYOUTS["dp2"], options)
    train(tmp_path / "run", LAYOUTS["dp2"], options, kill_after=12)
    train(tmp_path / "run", LAYOUTS["dp2"], options, resume=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert_same_bits(tmp_path / "run", tmp_path / "whole")
    assert samples(tmp_path / "run") == samples(tmp_path / "whole")
    sizes = [len(step) for step in samples(tmp_path / "run").values()]
    assert sizes == [2] * 7 + [4] * 4 + [6] * 2 + [8] * 7, sizes  # 40 samples in three parts


@pytest.mark.full
def test_a_finished_run_has_nothing_to_resume(whole: Make, tmp_path: Path) -> None:
    run = _copy(whole("single", "adamw"), tmp_path)
    train(run, SINGLE, _options("adamw"), resume=True)
    assert len(metrics(run)) == 8
    assert_same_bits(run, whole("single", "adamw"))
    more = [*_options("adamw"), "training.steps=10"]
    train(run, SINGLE, more, resume=True)
    assert [line["step"] for line in metrics(run)[8:]] == [9, 10]
