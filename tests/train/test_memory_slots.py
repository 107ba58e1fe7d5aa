"""A run whose ranks are killed goes on from memory: at most a step is done again, to the same bits.

Ranks 0 and 1 play one node, ranks 2 and 3 another: a folder of slots each, as agents make them.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint.memory import completion, slots
from megascale.checkpoint.memory.slot import Slot
from megascale.telemetry.hooks import Hook
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
    "dp4": {"tp": 1, "dp": 4, "pp": 1},
    "tp2-dp2": {"tp": 2, "dp": 2, "pp": 1, "zero": 2},
    "tp2-pp2": {"tp": 2, "dp": 1, "pp": 2},
}
SMALL = [
    "model.num_layers=2",
    "model.hidden_dropout=0.1",
    "training.global_batch_size=4",
    "training.steps=8",
    "optimizer.lr=0.002",
    "checkpoint.memory_interval=1",
    'checkpoint.async_mode="off"',  # so that it is known which checkpoints are on disk
]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="megascale-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@dataclass
class _Killer(Hook):
    """Ends the process when `step` is computed; the first time, or after a later step was."""

    step: int
    again: bool = False

    def on_step_end(self, step: int) -> None:
        if step == self.step and not self.again:
            os.kill(os.getpid(), signal.SIGKILL)
        self.again = self.again and step <= self.step


@dataclass(frozen=True)
class Plan:
    """What an agent would give the ranks, and how one of them ends.

    place  "step": when the step is computed; "again": when it is computed after a later one; else
           the name of a function of `completion`, or of `MemorySlots`, in which it ends in the save
           of the step
    ahead  save as beside a GPU: the loop a step ahead, hashes and copies behind training
    late   each copy is made as late as it may be, right before the next update
    from_disk  the driver has given up what memory holds
    """

    memory: Path
    victim: int = -1
    step: int = 0
    place: str = "step"
    ahead: bool = False
    late: bool = False
    no_room: bool = False
    from_disk: bool = False

    def __call__(self, rank_loop: Loop) -> None:
        rank = int(os.environ["RANK"])
        node = self.memory / f"node{rank // 2}"
        node.mkdir(exist_ok=True)
        os.environ["MEGASCALE_MEMORY_SLOTS"] = str(node / f"slots-{rank % 2:03d}")
        if self.from_disk:
            os.environ["MEGASCALE_RESUME"] = "disk"
        log = logging.FileHandler(self.memory / f"log{rank}")
        logging.getLogger("megascale").addHandler(log)
        logging.getLogger("megascale").setLevel(logging.INFO)
        if self.ahead:
            _go_ahead(rank_loop)
        if self.late:
            _copy_late()
        if self.no_room and rank == 3:
            os.posix_fallocate = _full
        if rank != self.victim:
            return
        if self.place in ("step", "again"):
            rank_loop.recorder.hooks.append(_Killer(self.step, self.place == "again"))
        else:
            _kill_in(self.place, rank_loop, self.step)

    @property
    def survivors(self) -> Plan:
        return replace(self, victim=-1)

    def said(self, rank: int = 0) -> str:
        return (self.memory / f"log{rank}").read_text()


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _go_ahead(rank_loop: Loop) -> None:
    import torch.distributed as dist

    rank_loop._runs_ahead = True
    group = dist.new_group(backend="gloo")
    made = slots.MemorySlots.__init__

    def make(self: slots.MemorySlots, *arguments: object, **named: object) -> None:
        named.update(is_behind=True, group_behind=group)
        made(self, *arguments, **named)  # type: ignore[arg-type]

    slots.MemorySlots.__init__ = make  # type: ignore[method-assign]


def _copy_late() -> None:
    """As a stream of CUDA may: whoever changes the state too early spoils the save."""
    copy, hook, finish = (
        getattr(slots.MemorySlots, name) for name in ("_copy_out", "before_update", "_finish")
    )
    waiting: list[Any] = []

    def now() -> None:
        while waiting:
            copy(*waiting.pop())

    def before_update(self: slots.MemorySlots) -> None:
        now()
        hook(self)

    def settled(self: slots.MemorySlots, begun: Any) -> None:
        now()
        finish(self, begun)

    def later(self: slots.MemorySlots, image: Any) -> tuple[None, list[Any]]:
        waiting.append((self, image))
        return None, []

    slots.MemorySlots._copy_out = later  # type: ignore[method-assign]
    slots.MemorySlots.before_update = before_update  # type: ignore[method-assign]
    slots.MemorySlots._finish = settled  # type: ignore[method-assign]


def _kill_in(place: str, rank_loop: Loop, step: int) -> None:
    places = (completion, completion.Completion, slots.MemorySlots)
    owner = next(owner for owner in places if hasattr(owner, place))
    original = getattr(owner, place)

    def die(*arguments: object) -> object:
        if rank_loop.progress.step == step:
            time.sleep(0.5)  # the others go on as far as they may
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(owner, place, die)


def _killed(folder: Path, layout: Layout, plan: Plan, *options: str, resume: bool = False) -> int:
    """Train until the victim dies; the last step whose loss was told."""
    with pytest.raises(AssertionError, match=r"died without a word|failed:"):
        train(folder, layout, [*SMALL, *options], resume=resume, plant=plan)
    lines = metrics(folder)
    return lines[-1]["step"] if lines else 0


def _resumed_at(folder: Path, layout: Layout, plan: Plan, *options: str) -> int:
    """Resume to the end; the step from which it went on."""
    num_before = len(metrics(folder))
    errors = train(folder, layout, [*SMALL, *options], resume=True, plant=plan)
    assert not any(errors), errors
    return metrics(folder)[num_before]["step"] - 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run without faults of a layout."""

    def whole(name: str) -> Path:
        def make(folder: Path) -> None:
            train(folder, LAYOUTS[name], [*SMALL, "checkpoint.memory_interval=0"])

        return shared_folder(tmp_path_factory, f"memory-slots-{name}", make)

    return whole


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "victim", "step", "place"),
    [
        ("dp4", 0, 5, "step"),
        ("tp2-dp2", 3, 6, "_copy_out"),
        ("tp2-dp2", 1, 5, "_mark"),
        ("dp4", 2, 4, "transfer"),
        ("tp2-pp2", 2, 7, "_finish"),
        ("tp2-pp2", 1, 3, "step"),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_killed_anywhere_at_most_a_step_is_done_again(
    whole: Callable[[str], Path],
    memory: Path,
    tmp_path: Path,
    layout: str,
    victim: int,
    step: int,
    place: str,
    ahead: bool,
) -> None:
    run, plan = tmp_path / "run", Plan(memory, victim, step, place, ahead)
    # without copies nothing makes up for a slot that was written too early
    options = [f"checkpoint.memory_copies={str(place != '_mark').lower()}"]
    told = _killed(run, LAYOUTS[layout], plan, *options)
    resumed = _resumed_at(run, LAYOUTS[layout], plan.survivors, *options)
    assert resumed >= told - 1, f"killed in step {step}, told {told}"
    assert curve(run) == curve(whole(layout))
    assert_same_bits(run, whole(layout))
    assert samples(run) == samples(whole(layout))


@pytest.mark.parametrize("layout", ["tp2-dp2", pytest.param("tp2-pp2", marks=pytest.mark.full)])
def test_a_lost_node_gets_its_state_from_the_other_and_can_be_lost_again(
    whole: Callable[[str], Path], memory: Path, tmp_path: Path, layout: str
) -> None:
    """First the one node, then the other, each with all it holds."""
    run, plan = tmp_path / "run", Plan(memory, 2, 3)
    told = _killed(run, LAYOUTS[layout], plan)
    assert "memory slots of 4 rank(s) are copied to another agent of their node" in plan.said()
    shutil.rmtree(memory / "node1")
    plan = replace(plan, victim=1, step=6)
    num_before = len(metrics(run))
    told = _killed(run, LAYOUTS[layout], plan, resume=True)
    assert metrics(run)[num_before]["step"] >= 3
    assert "rank(s) 2, 3 got their memory slots from their keepers" in plan.said()
    shutil.rmtree(memory / "node0")
    assert _resumed_at(run, LAYOUTS[layout], plan.survivors) >= told - 1
    assert "rank(s) 0, 1 got their memory slots from their keepers" in plan.said()
    assert curve(run) == curve(whole(layout))
    assert_same_bits(run, whole(layout))


@pytest.mark.parametrize("layout", ["tp2-dp2", pytest.param("tp2-pp2", marks=pytest.mark.full)])
def test_nothing_changes_the_state_before_the_copy_of_it_is_waited_for(
    whole: Callable[[str], Path], memory: Path, tmp_path: Path, layout: str
) -> None:
    run, plan = tmp_path / "run", Plan(memory, 1, 6, ahead=True, late=True)
    told = _killed(run, LAYOUTS[layout], plan)
    assert _resumed_at(run, LAYOUTS[layout], plan.survivors) >= told - 1
    assert "resumed from memory at step" in plan.said()
    assert curve(run) == curve(whole(layout))
    assert_same_bits(run, whole(layout))


@pytest.mark.full
def test_without_copies_a_lost_node_costs_the_steps_since_the_checkpoint(
    whole: Callable[[str], Path], memory: Path, tmp_path: Path
) -> None:
    run, plan = tmp_path / "run", Plan(memory, 2, 7)
    options = ("checkpoint.interval=4", "checkpoint.memory_copies=false")
    _killed(run, LAYOUTS["dp4"], plan, *options)
    shutil.rmtree(memory / "node1")
    assert _resumed_at(run, LAYOUTS["dp4"], plan.survivors, *options) == 4
    assert "nobody holds the part of rank(s) 2, 3" in plan.said()
    assert curve(run) == curve(whole("dp4"))


@pytest.mark.full
def test_a_damaged_slot_is_left_and_its_copy_taken(
    whole: Callable[[str], Path], memory: Path, tmp_path: Path
) -> None:
    run, plan = tmp_path / "run", Plan(memory, 0, 6)
    told = _killed(run, LAYOUTS["tp2-dp2"], plan)
    for name in ("own0", "own1"):
        _flip_the_last_bit(memory / "node0" / f"slots-001.{name}")
    assert _resumed_at(run, LAYOUTS["tp2-dp2"], plan.survivors) >= told - 1
    assert "is damaged and is not used" in plan.said(1)
    assert "rank(s) 1 got their memory slots from their keepers" in plan.said()
    assert curve(run) == curve(whole("tp2-dp2"))


def _flip_the_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.full
def test_another_layout_resumes_from_disk_and_says_why(memory: Path, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", Plan(memory, 0, 7)
    _killed(run, LAYOUTS["dp4"], plan, "checkpoint.interval=4")
    assert _resumed_at(run, LAYOUTS["tp2-dp2"], plan.survivors, "checkpoint.interval=4") == 4
    assert "of another layout (tensor 1, data 4, pipeline 1; now tensor 2, data 2" in plan.said()


# ---------------------------------------------------------------- one rank


def _one_killed(run: Path, plan: Plan, *options: str) -> None:
    _killed(run, SINGLE, plan, *options)


def test_slots_of_another_run_are_left_alone(memory: Path, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", Plan(memory, 0, 7)
    _one_killed(run, plan, "checkpoint.interval=4")
    other = Path(shutil.copytree(run, tmp_path / "other"))
    assert _resumed_at(other, SINGLE, plan.survivors, "checkpoint.interval=4") == 4
    assert "2 slot(s) of another run" in plan.said()


def test_slots_behind_a_checkpoint_that_was_set_aside_are_not_used(
    memory: Path, tmp_path: Path
) -> None:
    """Whoever takes a checkpoint away wants the run to go on from the one before."""
    run, plan = tmp_path / "run", Plan(memory, 0, 8)
    _one_killed(run, plan, "checkpoint.interval=3")
    assert checkpoints(run) == ["step-00000003", "step-00000006"]
    newest = run / "checkpoints" / "step-00000006"
    newest.rename(newest.with_name("aside-step-00000006"))
    assert _resumed_at(run, SINGLE, plan.survivors, "checkpoint.interval=3") == 3
    assert "memory slots are not used: checkpoint step-00000006 was taken away" in plan.said()


def test_a_driver_that_went_back_has_ranks_resume_from_disk(memory: Path, tmp_path: Path) -> None:
    """No checkpoint needed setting aside, but what memory holds is of a later step than wanted."""
    run, plan = tmp_path / "run", Plan(memory, 0, 6)
    _one_killed(run, plan, "checkpoint.interval=4")
    again = replace(plan.survivors, from_disk=True)
    assert _resumed_at(run, SINGLE, again, "checkpoint.interval=4") == 4


def test_memory_that_is_no_further_than_the_disk_is_not_used(memory: Path, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", Plan(memory, 0, 7)
    _one_killed(run, plan, "checkpoint.interval=6")
    assert _resumed_at(run, SINGLE, plan.survivors, "checkpoint.interval=6") == 6
    assert "they hold step 6, the newest checkpoint on disk is of step 6" in plan.said()


def test_memory_stands_in_for_a_damaged_checkpoint(memory: Path, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", Plan(memory, 0, 7)
    _one_killed(run, plan, "checkpoint.interval=3")
    _flip_the_last_bit(run / "checkpoints" / "step-00000006" / "rank-00000.safetensors")
    assert _resumed_at(run, SINGLE, plan.survivors, "checkpoint.interval=3") == 6
    assert "skipping a corrupt checkpoint" in plan.said()
    assert "resumed from memory at step 6" in plan.said()


@dataclass(frozen=True)
class _PoisonedAt5:
    """The gradient of step 5 is not finite, once; then `plan`."""

    plan: Plan

    def __call__(self, rank_loop: Loop) -> None:
        self.plan(rank_loop)
        optimizer, update = rank_loop.assembly.optimizer, rank_loop.assembly.optimizer.step
        poisoned: list[int] = []

        def step(*arguments: Any, **options: Any) -> Any:
            if rank_loop.progress.step == 4 and not poisoned:
                poisoned.append(5)
                optimizer.flats[0].grad[:1] = float("nan")
            return update(*arguments, **options)

        optimizer.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_that_went_back_does_not_resume_from_before(
    memory: Path, tmp_path: Path, ahead: bool
) -> None:
    """At step 5 back to the checkpoint of step 3, and killed before anything was kept again."""
    run, plan = tmp_path / "run", Plan(memory, 0, 4, "again", ahead)
    options = [*SMALL, "checkpoint.interval=3", "training.nonfinite_policy=rollback"]
    with pytest.raises(AssertionError, match="died without a word"):
        train(run, SINGLE, options, plant=_PoisonedAt5(plan))
    assert metrics(run)[-1]["step"] == 5
    assert all(Slot(path).header() is None for path in (memory / "node0").iterdir())
    assert _resumed_at(run, SINGLE, plan.survivors, "checkpoint.interval=3") == 3


@pytest.mark.full
def test_no_room_on_one_rank_is_said_once_and_training_goes_on(
    whole: Callable[[str], Path], memory: Path, tmp_path: Path
) -> None:
    run, plan = tmp_path / "run", Plan(memory, no_room=True)
    assert train(run, LAYOUTS["dp4"], SMALL, plant=plan) == [None] * 4
    assert plan.said().count("training goes on without memory slots: rank 3 of 4: ") == 1
    assert "make /dev/shm larger" in plan.said()
    assert not list(memory.glob("node*/*"))
    assert curve(run) == curve(whole("dp4"))


@dataclass(frozen=True)
class _NoAgent:
    plan: Plan

    def __call__(self, rank_loop: Loop) -> None:
        self.plan(rank_loop)
        if os.environ["RANK"] == "0":
            del os.environ["MEGASCALE_MEMORY_SLOTS"]


def test_without_an_agent_training_goes_on_without(memory: Path, tmp_path: Path) -> None:
    """Also where it is missing on one rank alone."""
    plan = Plan(memory)
    layout: Layout = {"tp": 1, "dp": 2, "pp": 1}
    assert train(tmp_path / "run", layout, SMALL, plant=_NoAgent(plan)) == [None] * 2
    assert "rank 0 has no memory that outlives it: agents give it (`megascale run`)" in plan.said()
    assert not list(memory.glob("node*/*"))


def test_a_new_start_forgets_what_it_finds(memory: Path, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", Plan(memory, 0, 5)
    _one_killed(run, plan)
    shutil.rmtree(run)
    _one_killed(run, replace(plan, step=1))
    assert all(Slot(path).header() is None for path in (memory / "node0").iterdir())
