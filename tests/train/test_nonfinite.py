"""A gradient that is not finite is never applied; then the policy: skip, stop, or roll back.

The gradients are poisoned on their way into the optimizer, where the norm that finds them is taken,
or through the loss, as a diverging run does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from megascale.checkpoint import FullReader, read_meta
from megascale.checkpoint.reading import shared_plan
from megascale.events import Incident, read_events
from megascale.train import loop
from megascale.train.loop import Loop
from megascale.train.step import train_step
from tests.train.command import train_here
from tests.train.runs import SINGLE, Layout, checkpoints, metrics, samples, state, train

pytestmark = pytest.mark.full

LAYOUTS: dict[str, Layout] = {
    "single": SINGLE,
    "tp2": {"tp": 2, "dp": 1, "pp": 1},
    "pp2": {"tp": 1, "dp": 1, "pp": 2},
    "dp2": {"tp": 1, "dp": 2, "pp": 1, "zero": 2},
}
OPTIONS = [
    "model.num_layers=2",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "training.steps=6",
    "lr_scheduler.decay_type=constant",
    "checkpoint.interval=1",
    "checkpoint.keep_latest_k=99",
]
FC2 = "layers.1.mlp.fc2.weight"
NORM = "layers.0.norm1.weight"


@dataclass(frozen=True)
class Poison:
    """Puts NaN into the gradients of `names` in the optimizer's n-th calls, or for steps."""

    names: tuple[str, ...]
    calls: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    runs_ahead: bool = False

    def __call__(self, rank: Loop) -> None:
        rank._runs_ahead = self.runs_ahead
        optimizer, update, calls = rank.assembly.optimizer, rank.assembly.optimizer.step, 0

        def step(lr: float, grad_scale: float | Tensor = 1.0, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in self.calls or rank.progress.step + 1 in self.steps:
                for segment in (s for flat in optimizer.flats for s in flat.segments):
                    if segment.name in self.names:
                        segment.grad[:1] = float("nan")
            return update(lr, grad_scale, **options)

        optimizer.step = step  # type: ignore[method-assign,assignment]


def _policy(name: str) -> list[str]:
    return [*OPTIONS, f"training.nonfinite_policy={name}"]


def _assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, values in left.items():
        np.testing.assert_array_equal(values, right[key], err_msg=key)


def _saved(run: Path, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    path = run / "checkpoints" / f"step-{step:08d}"
    reader = FullReader(path)
    return {key: reader.read(key).numpy() for key in reader.keys("")}, read_meta(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_step_changes_no_bit(tmp_path: Path, layout: str) -> None:
    run = tmp_path / "run"
    errors = train(run, LAYOUTS[layout], _policy("skip"), plant=Poison((FC2,), calls=(4,)))
    assert set(errors) == {None}
    (before, meta), (after, meta_after) = _saved(run, 3), _saved(run, 4)
    _assert_same(after, before)
    assert meta_after["num_updates"] == meta["num_updates"] == 3
    assert meta_after["consumed_samples"] == meta["consumed_samples"] + 4
    moved = _saved(run, 5)[0]
    assert any((moved[key] != values).any() for key, values in after.items())
    lines = metrics(run)
    assert [line.get("nonfinite", []) for line in lines] == [[]] * 3 + [["grad_norm"]] + [[]] * 2
    assert [line["skipped_steps"] for line in lines] == [0, 0, 0, 1, 1, 1]
    events = list(read_events(run / "telemetry" / "rank_00000.jsonl"))
    seen = [e for e in events if isinstance(e, Incident) and e.name == "nonfinite"]
    assert [(e.step, e.detail["parameter"]) for e in seen] == [(4, FC2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stop_names_the_first_bad_parameter(tmp_path: Path, layout: str) -> None:
    run = tmp_path / "run"
    plant = Poison((FC2, NORM), calls=(4,))
    message = f"NumericalError: step 4: the gradient of {NORM} is not finite; it was not applied. "
    for error in train(run, LAYOUTS[layout], _policy("stop"), plant=plant):
        assert error == f"{message}Stopped (training.nonfinite_policy = 'stop')"
    assert checkpoints(run)[-1] == "step-00000003"


def test_a_loss_that_is_not_finite_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def diverge(assembly: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            loss = assembly.program.loss
            assembly.program.loss = lambda *given: loss(*given) * float("inf")
        return train_step(assembly, *arguments, **options)

    monkeypatch.setattr(loop, "train_step", diverge)
    run = tmp_path / "run"
    assert train_here(monkeypatch, run, *_policy("stop")) == 6
    message = "error: step 3: the gradient of embed.tokens.weight is not finite; it was not applied"
    assert message in capsys.readouterr().err
    assert metrics(run)[-1]["nonfinite"] == ["loss", "grad_norm"]
    assert checkpoints(run)[-1] == "step-00000002"


@pytest.mark.parametrize(
    ("layout", "runs_ahead"),
    [("single", False), ("single", True), ("tp2", True), ("pp2", False), ("dp2", True)],
)
def test_rolling_back_leaves_out_the_data(tmp_path: Path, layout: str, runs_ahead: bool) -> None:
    """Saved at 3, bad at 5: steps 4 and 5 are done again, on what came behind both.

    So the parameters are those of a run that skipped its 4th and 5th update.
    """
    rolled, skipped = tmp_path / "rolled", tmp_path / "skipped"
    options = [*_policy("rollback"), "checkpoint.interval=3"]
    plant = Poison((FC2,), calls=(5,), runs_ahead=runs_ahead)
    assert set(train(rolled, LAYOUTS[layout], options, plant=plant)) == {None}
    assert [line["step"] for line in metrics(rolled)] == [1, 2, 3, 4, 5, 4, 5, 6]
    assert list(samples(rolled)) == [0, 4, 8, 12, 16, 20, 24, 28]
    assert _saved(rolled, 6)[1]["consumed_samples"] == 32
    more = [*_policy("skip"), "training.steps=8"]
    train(skipped, LAYOUTS[layout], more, plant=Poison((FC2,), calls=(4, 5)))
    _assert_same(state(rolled), state(skipped))


@dataclass(frozen=True)
class _CountsPlans:
    """Rolled back twice; each plan of a load leaves a line in `file`."""

    file: Path

    def __call__(self, rank: Loop) -> None:
        Poison((FC2,), calls=(5, 8))(rank)
        make = shared_plan.make_plan

        def counted(*arguments: Any) -> Any:
            with self.file.open("a") as file:
                print("planned", file=file)
            return make(*arguments)

        shared_plan.make_plan = counted  # type: ignore[assignment]


def test_a_second_roll_back_needs_no_plan(tmp_path: Path) -> None:
    planned = tmp_path / "planned"
    options = [*_policy("rollback"), "checkpoint.interval=3", "training.max_nonfinite_steps=5"]
    assert train(tmp_path / "run", SINGLE, options, plant=_CountsPlans(planned)) == [None]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 4, 5, 6, 4, 5, 6]
    assert planned.read_text() == "planned\n"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_last_step_may_be_rolled_back(tmp_path: Path, runs_ahead: bool) -> None:
    run = tmp_path / "run"
    plant = Poison((FC2,), calls=(6,), runs_ahead=runs_ahead)
    options = [*_policy("rollback"), "checkpoint.interval=4"]
    assert train(run, SINGLE, options, plant=plant) == [None]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6, 5, 6]
    assert checkpoints(run) == ["step-00000004", "step-00000006"]


def test_nothing_to_roll_back_to(tmp_path: Path) -> None:
    options = [*_policy("rollback"), "checkpoint.interval=5"]
    (error,) = train(tmp_path / "run", SINGLE, options, plant=Poison((FC2,), calls=(3,)))
    assert error is not None
    assert error.startswith("CheckpointError: nothing to roll back to")
    assert "set checkpoint.interval" in error


def test_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    options = [*_policy("skip"), "training.max_nonfinite_steps=3"]
    apart = Poison((FC2,), calls=(1, 2, 4, 5))
    assert train(tmp_path / "apart", SINGLE, options, plant=apart) == [None]
    assert metrics(tmp_path / "apart")[-1]["skipped_steps"] == 4
    in_a_row = Poison((FC2,), calls=(2, 3, 4))
    (error,) = train(tmp_path / "run", SINGLE, options, plant=in_a_row)
    assert error is not None
    assert error.startswith(f"NumericalError: step 4: the gradient of {FC2} is not finite")
    assert error.endswith("after 3 such steps in a row (training.max_nonfinite_steps)")


@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_a_step_that_is_bad_every_time_is_not_rolled_back_for_ever(
    tmp_path: Path, layout: str
) -> None:
    """Good steps between the same checkpoint and the same bad step are no progress."""
    options = [*_policy("rollback"), "checkpoint.interval=2", "training.max_nonfinite_steps=3"]
    run = tmp_path / "run"
    for error in train(run, LAYOUTS[layout], options, plant=Poison((FC2,), steps=(6,))):
        assert error is not None
        assert "step 6" in error
        assert "after 3 such steps" in error
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6, 5, 6, 5, 6]
