"""Which group, and which settings, a run's checkpoints are agreed on with."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import find_latest, load_newest
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.manifest import OtherFormatError, list_checkpoints, read_mark
from megascale.config import CheckpointConfig, CommConfig, RunConfig, TrainingConfig
from megascale.storage import open_storage
from megascale.telemetry.hooks import Hook
from megascale.train import memory_slots
from megascale.train.control_groups import control_group
from megascale.train.loop import Loop
from tests.checkpoint.test_cli import set_format
from tests.train.command import tree
from tests.train.runs import SINGLE, train


def test_the_control_group_has_the_deadline_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "new_group", made.update)
    config = RunConfig(comm=CommConfig(timeout_s=1234.0))
    control_group(SimpleNamespace(config=config, mesh=SimpleNamespace(world_size=2)))  # type: ignore[arg-type]
    assert made == {"backend": "gloo", "timeout": timedelta(seconds=1234.0)}


@pytest.mark.parametrize(
    ("device", "run_ahead", "is_behind"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_memory_is_completed_behind_training_only_where_the_loop_is_a_step_ahead(
    monkeypatch: pytest.MonkeyPatch, device: str, run_ahead: bool, is_behind: bool
) -> None:
    """Else a step could be told before the one before it counts: a kill would cost two. The group
    has the deadline of a collective: no storage is waited for, and a dead rank not for hours."""
    config = RunConfig(
        comm=CommConfig(timeout_s=1234.0),
        checkpoint=CheckpointConfig(memory_interval=1),
        training=TrainingConfig(run_ahead=run_ahead),
    )
    assembly = SimpleNamespace(
        config=config,
        device=torch.device(device),
        mesh=SimpleNamespace(world_size=2),
        zero=None,
        optimizer=None,
    )
    made: dict[str, Any] = {}
    monkeypatch.setattr(dist, "new_group", lambda **options: options)
    monkeypatch.setattr(memory_slots, "state_pieces", lambda *_: [])
    monkeypatch.setattr(memory_slots, "_copies", lambda _: [])
    monkeypatch.setattr(memory_slots, "_identity", lambda *_: "run")
    monkeypatch.setattr(memory_slots, "MemorySlots", lambda *_, **options: made.update(options))
    monkeypatch.setenv("MEGASCALE_MEMORY_SLOTS", "/dev/shm/none")
    opened = memory_slots.open_slots(assembly, None, None, Ranks(None), {})  # type: ignore[arg-type]
    assert opened is not None
    assert opened.is_tier
    assert made["is_behind"] is is_behind
    assert made["timeout_s"] == 1234.0
    group = {"backend": "gloo", "timeout": timedelta(seconds=1234.0)}
    assert made["group_behind"] == (group if is_behind else None)


@dataclass
class _MovesAway(Hook):
    """When the third has its mark."""

    folder: Path

    def on_step_end(self, step: int) -> None:
        if step == 8:
            until_s = time.monotonic() + 30.0
            while not (self.folder / "step-00000006" / "COMMITTED").exists():
                assert time.monotonic() < until_s, sorted(self.folder.iterdir())
                time.sleep(0.01)
            time.sleep(0.05)  # and its writer has done with it
            self.folder.rename(self.folder.with_name("away"))


@dataclass(frozen=True)
class _MovedAway:
    folder: Path

    def __call__(self, loop: Loop) -> None:
        loop.recorder.hooks.append(_MovesAway(self.folder))


@pytest.mark.parametrize("mode", ["off", "background"])
def test_checkpoints_that_were_moved_away_and_come_back_are_older(
    tmp_path: Path, mode: str
) -> None:
    """Their numbers are those of saves before, whatever the folder holds at the next one."""
    run = tmp_path / "run"
    options = [
        "training.steps=10",
        "checkpoint.interval=2",
        f'checkpoint.async_mode="{mode}"',
    ]
    assert train(run, SINGLE, options, plant=_MovedAway(run / "checkpoints")) == [None]
    away = list_checkpoints(run / "away").committed
    assert len(away) == 3
    for path in away:
        path.rename(run / "checkpoints" / path.name)
    newest = list_checkpoints(run / "checkpoints").committed[0]
    assert newest.name == "step-00000010"
    assert read_mark(open_storage(run / "checkpoints"), newest.name).number == 5


def test_fewer_stay_from_the_resume_on(tmp_path: Path) -> None:
    """What is advised for a disk that is full helps: old ones go before the next is written."""
    run = tmp_path / "run"
    options = ["checkpoint.interval=2", "checkpoint.keep_latest_k=9"]
    assert train(run, SINGLE, ["training.steps=6", *options]) == [None]
    more = ["training.steps=7", "checkpoint.interval=0", "checkpoint.save_at_end=false"]
    assert train(run, SINGLE, [*more, "checkpoint.keep_latest_k=1"], resume=True) == [None]
    assert [path.name for path in list_checkpoints(run / "checkpoints").committed] == [
        "step-00000006"
    ]


def test_a_finished_run_keeps_what_it_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["training.steps=4", "checkpoint.interval=2"]
    assert train(run, SINGLE, options) == [None]
    assert train(run, SINGLE, [*options, "checkpoint.keep_latest_k=1"], resume=True) == [None]
    assert len(list_checkpoints(run / "checkpoints").committed) == 2


@pytest.mark.parametrize("number", [1, 3])
def test_a_newest_checkpoint_of_another_format_is_refused(tmp_path: Path, number: int) -> None:
    """Not passed over for an older one, behind which it would be deleted."""
    run = tmp_path / "run"
    options = ["checkpoint.interval=2"]
    assert train(run, SINGLE, ["training.steps=4", *options]) == [None]
    set_format(run / "checkpoints" / "step-00000004", number)
    before = tree(run / "checkpoints")
    (error,) = train(run, SINGLE, ["training.steps=8", *options], resume=True)
    assert error is not None
    assert f"checkpoint format {number} of a" in error
    assert tree(run / "checkpoints") == before
    with pytest.raises(OtherFormatError, match="the version that wrote it"):
        find_latest(run / "checkpoints")
    with pytest.raises(OtherFormatError, match="step-00000004: checkpoint format"):
        load_newest(run / "checkpoints", [])
