"""Memory at every step, disk and remote behind training, all at once: ranks are killed at any
moment, tiers are lost, and what is left brings back the furthest state, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import verify
from megascale.checkpoint.manifest import list_checkpoints
from megascale.train.loop import Loop
from megascale.train.persistence import Persistence
from tests.shared import shared_folder
from tests.train.runs import Layout, assert_same_bits, curve, metrics, train
from tests.train.test_behind import Slow
from tests.train.test_memory_slots import Plan, memory

__all__ = ["memory"]  # a fixture
TP2_DP2: Layout = {"tp": 2, "dp": 2, "pp": 1, "zero": 2}
SETTINGS = [
    "model.num_layers=2",
    "model.hidden_dropout=0.1",
    "training.global_batch_size=4",
    "training.steps=12",
    "optimizer.lr=0.002",
    "lr_scheduler.decay_type=constant",
    "checkpoint.memory_interval=1",
    "checkpoint.interval=2",
    "checkpoint.remote_interval=4",
]


@dataclass(frozen=True)
class KilledSometime:
    """A rank of `plan` ends so long after stage 1 of a step, while files take a while."""

    plan: Plan
    victim: int
    step: int
    after_s: float

    def __call__(self, rank_loop: Loop) -> None:
        self.plan(rank_loop)
        Slow(0.05)(rank_loop)
        if int(os.environ["RANK"]) != self.victim:
            return
        keep = Persistence.keep

        def die(persistence: Persistence, progress: Any, **options: Any) -> None:
            if progress.step == self.step:
                kill = (os.getpid(), signal.SIGKILL)
                threading.Timer(self.after_s, os.kill, kill).start()
            keep(persistence, progress, **options)

        Persistence.keep = die  # type: ignore[method-assign,assignment]


def _settings(remote: Path, *more: str) -> list[str]:
    return [*SETTINGS, f'checkpoint.remote="{remote}"', *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without faults, and without memory."""

    def make(folder: Path) -> None:
        options = [*_settings(folder / "remote"), "checkpoint.memory_interval=0"]
        assert not any(train(folder / "run", TP2_DP2, options))

    return shared_folder(tmp_path_factory, "all-tiers", make) / "run"


def _killed(run: Path, remote: Path, plan: KilledSometime) -> int:
    """The last step whose values were told."""
    options = _settings(remote, "training.steps=4000")
    with pytest.raises(AssertionError, match=r"died without a word|failed:"):
        train(run, TP2_DP2, options, plant=plan)
    return int(metrics(run)[-1]["step"])


def _resumed(run: Path, remote: Path, plan: Plan) -> int:
    """Resume to the end; the step from which it went on."""
    before = len(metrics(run))
    errors = train(run, TP2_DP2, _settings(remote), resume=True, plant=plan)
    assert not any(errors), errors
    return int(metrics(run)[before]["step"]) - 1


def _assert_as(run: Path, whole: Path) -> None:
    assert {step: curve(run)[step] for step in curve(whole)} == curve(whole)
    assert_same_bits(run, whole)


def _moments(count: int) -> list[tuple[int, int, float]]:
    rng = random.Random(5)
    return [(rng.randrange(4), rng.randrange(3, 9), rng.uniform(0.0, 0.12)) for _ in range(count)]


@pytest.mark.parametrize(
    ("victim", "step", "after_s"),
    [m if n < 2 else pytest.param(*m, marks=pytest.mark.full) for n, m in enumerate(_moments(10))],
)
def test_killed_at_any_moment_at_most_a_step_is_done_again(
    whole: Path, memory: Path, tmp_path: Path, victim: int, step: int, after_s: float
) -> None:
    run, remote, plan = tmp_path / "run", tmp_path / "remote", Plan(memory)
    told = _killed(run, remote, KilledSometime(plan, victim, step, after_s))
    assert _resumed(run, remote, plan) >= told - 1
    assert "resumed from memory at step" in plan.said()
    for root in (run / "checkpoints", remote):
        for path in list_checkpoints(root).committed:
            verify(path)
    _assert_as(run, whole)


@pytest.mark.parametrize(
    "lost",
    [
        ("node1",),
        pytest.param(("node0", "checkpoints"), marks=pytest.mark.full),
        ("node0", "node1", "checkpoints"),
        pytest.param(("node0", "node1"), marks=pytest.mark.full),
    ],
)
def test_whatever_is_left_brings_back_the_furthest_state(
    whole: Path, memory: Path, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    """A node: its peer's memory, verified by hash on arrival; both: the disk; that too: remote."""
    run, remote = tmp_path / "run", tmp_path / "remote"
    plan = Plan(memory)
    told = _killed(run, remote, KilledSometime(plan, 1, 11, 0.05))
    newest = {
        "memory": told - 1,
        "disk": _newest(run / "checkpoints"),
        "remote": _newest(remote),
    }
    assert newest["memory"] >= newest["disk"] >= newest["remote"] >= 4, newest
    for name in lost:
        shutil.rmtree(run / name if name == "checkpoints" else memory / name)
    resumed = _resumed(run, remote, replace(plan))
    if {"node0", "node1"} <= set(lost):
        assert resumed == newest["remote" if "checkpoints" in lost else "disk"]
    else:
        assert resumed >= newest["memory"]
        assert "got their memory slots from their keepers" in plan.said()
    _assert_as(run, whole)


def _newest(root: Path) -> int:
    return max(int(path.name[5:13]) for path in list_checkpoints(root).committed)
