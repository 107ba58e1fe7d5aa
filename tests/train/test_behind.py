"""Checkpoints that are written behind training: the same bits, no step waits for a slow storage,
whatever kills a rank in the middle is survived, and what is due is never left out."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from megascale.checkpoint import read_meta, verify
from megascale.events import Incident, Span, Step, read_events
from megascale.storage import FileWriter
from megascale.train.loop import Loop
from megascale.train.persistence import Persistence
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
    "dp2": {"tp": 1, "dp": 2, "pp": 1},
    "tp2-dp2": {"tp": 2, "dp": 2, "pp": 1, "zero": 2},
    "tp2-pp2": {"tp": 2, "dp": 1, "pp": 2},
}
OFF = 'checkpoint.async_mode="off"'
SMALL = [
    "model.num_layers=2",
    "model.hidden_dropout=0.1",
    "training.global_batch_size=4",
    "training.steps=8",
    "optimizer.lr=0.002",
    "lr_scheduler.decay_type=constant",
    "checkpoint.interval=2",
    "checkpoint.keep_latest_k=99",
]


@dataclass(frozen=True)
class Slow:
    """A storage that takes `seconds` longer for each file."""

    seconds: float

    def __call__(self, _rank_loop: Loop) -> None:
        write = FileWriter.write

        def slow(*arguments: Any, **options: Any) -> Any:
            time.sleep(self.seconds)
            return write(*arguments, **options)

        FileWriter.write = slow  # type: ignore[method-assign]


def events(run: Path, rank: int = 0) -> list[Any]:
    return list(read_events(run / "telemetry" / f"rank_{rank:05d}.jsonl"))


def incidents(run: Path, name: str, rank: int = 0) -> list[Incident]:
    return [e for e in events(run, rank) if isinstance(e, Incident) and e.name == name]


def spans(run: Path, op: str) -> list[Span]:
    return [e for e in events(run) if isinstance(e, Span) and (e.name, e.op) == ("checkpoint", op)]


def committed(run: Path) -> list[str]:
    return sorted(mark.parent.name for mark in run.glob("checkpoints/*/COMMITTED"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a layout whose checkpoints training waits for."""

    def whole(name: str) -> Path:
        def make(folder: Path) -> None:
            train(folder, LAYOUTS[name], [*SMALL, OFF])

        return shared_folder(tmp_path_factory, f"behind-{name}", make)

    return whole


@pytest.mark.parametrize(
    "layout",
    ["single", "dp2", *(pytest.param(n, marks=pytest.mark.full) for n in list(LAYOUTS)[2:])],
)
def test_the_same_is_saved_as_by_training_that_waits(
    whole: Callable[[str], Path], tmp_path: Path, layout: str
) -> None:
    run = tmp_path / "run"
    errors = train(run, LAYOUTS[layout], SMALL)
    assert not any(errors), errors
    assert checkpoints(run) == checkpoints(whole(layout))
    for name in checkpoints(run):
        got, expected = (folder / "checkpoints" / name for folder in (run, whole(layout)))
        verify(got)
        assert read_meta(got) == read_meta(expected)
        files = [path.name for path in got.glob("rank-*")]
        assert [(got / f).read_bytes() for f in files] == [
            (expected / f).read_bytes() for f in files
        ]
    assert_same_bits(run, whole(layout))
    assert len(spans(run, "keep")) == 4
    assert not spans(run, "save")


def test_steps_go_on_while_a_slow_storage_writes(tmp_path: Path) -> None:
    """A file takes two seconds: no step waits for it, whatever else the machine does."""
    run, options = tmp_path / "run", [*SMALL, "training.steps=60", "checkpoint.interval=30"]
    assert train(run, SINGLE, options, plant=Slow(2.0)) == [None]
    first, *_ = incidents(run, "checkpoint")
    assert first.step == 30
    keep = spans(run, "keep")[0]
    steps = [e for e in events(run) if isinstance(e, Step)]
    beside = [s for s in steps if keep.t0_ns < s.t0_ns and s.t0_ns + s.dur_ns < first.t_ns]
    assert [s.step for s in beside] == list(range(31, 31 + len(beside)))
    assert len(beside) >= 5, f"{len(beside)} steps in two seconds"
    assert max(s.dur_ns for s in beside) < 1.0e9
    assert max(s.dur_ns for s in spans(run, "keep")) < 0.5e9
    # that of step 60 is due while it is being written, unless the machine is busy: then told
    for told in incidents(run, "checkpoint_waited"):
        assert told.step == 30
        assert 0.0 < told.detail["seconds"] < 2.5
    assert checkpoints(run) == ["step-00000030", "step-00000060"]


def test_what_is_due_while_one_is_written_waits_and_is_never_left_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [*SMALL, "training.steps=6", "checkpoint.interval=1"]
    assert train(run, LAYOUTS["dp2"], options, plant=Slow(0.2)) == [None] * 2
    assert checkpoints(run) == [f"step-{step:08d}" for step in range(1, 7)]
    for name in checkpoints(run):
        verify(run / "checkpoints" / name)
    for rank in range(2):
        assert [e.step for e in incidents(run, "checkpoint", rank)] == [1, 2, 3, 4, 5, 6]
        assert [e.step for e in incidents(run, "checkpoint_waited", rank)] == [1, 2, 3, 4, 5]
    assert len(spans(run, "wait")) == 5
    assert len(spans(run, "join")) == 1


@dataclass(frozen=True)
class KillInSave:
    """The victim ends so long after the first stage of `step`."""

    victim: int
    step: int
    after_s: float
    seconds: float = 0.05  # that a file takes longer, so that there is a middle

    def __call__(self, rank_loop: Loop) -> None:
        Slow(self.seconds)(rank_loop)
        if int(os.environ["RANK"]) != self.victim:
            return
        keep = Persistence.keep

        def die(persistence: Persistence, progress: Any, **options: Any) -> None:
            if progress.step == self.step:
                kill = (os.getpid(), signal.SIGKILL)
                threading.Timer(self.after_s, os.kill, kill).start()
            keep(persistence, progress, **options)

        Persistence.keep = die  # type: ignore[method-assign,assignment]


def _plans(count: int) -> list[KillInSave]:
    rng = random.Random(11)
    return [
        KillInSave(rng.randrange(2), rng.choice((2, 4, 6)), rng.uniform(0.0, 0.15))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "plan",
    [p if n < 3 else pytest.param(p, marks=pytest.mark.full) for n, p in enumerate(_plans(12))],
)
def test_killed_at_any_moment_of_a_save_the_newest_whole_one_is_resumed(
    whole: Callable[[str], Path], tmp_path: Path, plan: KillInSave
) -> None:
    run = tmp_path / "run"
    with pytest.raises(AssertionError, match=r"died without a word|failed:"):
        train(run, LAYOUTS["dp2"], [*SMALL, "training.steps=400"], plant=plan)
    steps = [int(name.removeprefix("step-")) for name in committed(run)]
    assert steps == [step for step in (2, 4, 6) if step <= max(steps, default=0)]
    before = len(metrics(run)) if (run / "metrics.jsonl").exists() else 0
    errors = train(run, LAYOUTS["dp2"], SMALL, resume=True)
    assert not any(errors), errors
    assert metrics(run)[before]["step"] == max(steps, default=0) + 1
    assert curve(run) == {**curve(run), **curve(whole("dp2"))}
    assert_same_bits(run, whole("dp2"))
    assert set(samples(run)) >= set(samples(whole("dp2")))


def test_a_save_that_fails_behind_training_is_told_and_the_next_one_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, LAYOUTS["dp2"], SMALL, plant=_FullOnce(4)) == [None] * 2
    assert checkpoints(run) == ["step-00000002", "step-00000006", "step-00000008"]
    for rank in range(2):
        (failed,) = incidents(run, "checkpoint_failed", rank)
        assert failed.step == 4
        assert "the disk is full" in failed.detail["reason"]
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))


@dataclass(frozen=True)
class _FullOnce:
    """Rank 1 has no room for its file of `step`."""

    step: int

    def __call__(self, rank_loop: Loop) -> None:
        from megascale.errors import StorageError

        write = FileWriter.write

        def full(writer: FileWriter, job: Any, *arguments: Any, **options: Any) -> Any:
            if os.environ["RANK"] == "1" and f"step-{self.step:08d}" in job.name:
                raise StorageError("the disk is full; free space")
            return write(writer, job, *arguments, **options)

        FileWriter.write = full  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_minutes_save_the_same_step_on_all_ranks(tmp_path: Path, layout: str) -> None:
    run = tmp_path / "run"
    options = [*SMALL, "training.steps=40", "checkpoint.interval=0"]
    assert not any(train(run, LAYOUTS[layout], [*options, "checkpoint.interval_minutes=0.001"]))
    ranks = LAYOUTS[layout]["dp"]
    steps = [[e.step for e in incidents(run, "checkpoint", rank)] for rank in range(ranks)]
    assert all(one == steps[0] for one in steps), steps
    assert len(steps[0]) >= 3
    assert steps[0][-1] == 40
    assert checkpoints(run) == [f"step-{step:08d}" for step in steps[0]]


def test_a_run_that_goes_back_waits_for_the_save_that_is_being_written(tmp_path: Path) -> None:
    """Step 5 is bad while the checkpoint of step 4 is being written: back to step 4."""
    run = tmp_path / "run"
    options = [*SMALL, "checkpoint.interval=4", "training.nonfinite_policy=rollback"]
    assert train(run, SINGLE, options, plant=_SlowAndBad()) == [None]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert checkpoints(run) == ["step-00000004", "step-00000008"]
    assert [span.op for span in _checkpoint_spans(run)][:3] == ["keep", "join", "load"]


def _checkpoint_spans(run: Path) -> list[Span]:
    found = [e for e in events(run) if isinstance(e, Span) and e.name == "checkpoint"]
    return sorted(found, key=lambda span: span.t0_ns)


@dataclass(frozen=True)
class _SlowAndBad:
    """Files take half a second, and the gradient of step 5 is not finite, once."""

    def __call__(self, rank_loop: Loop) -> None:
        Slow(0.5)(rank_loop)
        optimizer, update = rank_loop.assembly.optimizer, rank_loop.assembly.optimizer.step
        poisoned: list[int] = []

        def step(*arguments: Any, **options: Any) -> Any:
            if rank_loop.progress.step == 4 and not poisoned:
                poisoned.append(5)
                optimizer.flats[0].grad[:1] = float("nan")
            return update(*arguments, **options)

        optimizer.step = step  # type: ignore[method-assign]


def test_a_rank_that_was_given_up_commits_nothing(tmp_path: Path) -> None:
    """A driver gave the folder to a later epoch while the file was being written."""
    run = tmp_path / "run"
    (error,) = train(run, SINGLE, SMALL, plant=_GivenUp())
    assert error is not None
    assert error.startswith("LaunchError: ")
    assert "it was given up, and nothing of it is saved" in error
    assert committed(run) == []


@dataclass(frozen=True)
class _GivenUp:
    def __call__(self, rank_loop: Loop) -> None:
        os.environ["MEGASCALE_EPOCH"] = "1"
        write = FileWriter.write

        def give_up(*arguments: Any, **options: Any) -> Any:
            written = write(*arguments, **options)
            lock = rank_loop.folder.path / "lock"
            lock.write_text("elsewhere process 1, epoch 2\n")
            return written

        FileWriter.write = give_up  # type: ignore[method-assign]


def test_the_process_that_writes_ends_with_its_run(tmp_path: Path) -> None:
    assert train(tmp_path / "run", SINGLE, SMALL, plant=_SayPid(tmp_path / "pid")) == [None]
    owner = (tmp_path / "pid").read_text()
    deadline_s = time.monotonic() + 10
    while left := _writers_of(owner):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


@dataclass(frozen=True)
class _SayPid:
    file: Path

    def __call__(self, _rank_loop: Loop) -> None:
        self.file.write_text(str(os.getpid()))


def _writers_of(owner: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if "megascale.storage.writer_process" in words and owner in words:
            found.append(process.info["pid"])
    return found
