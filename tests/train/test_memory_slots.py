"""A run whose ranks are killed goes on from memory: at most a step is done again, to the same bits.

Ranks 0 and 1 play one node, ranks 2 and 3 another: a folder of slots each, as agents make them.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megascale.checkpoint.memory import slots
from megascale.telemetry.hooks import Hook
from megascale.train.loop import Loop
from tests.train.runs import Layout, assert_same_bits, curve, metrics, samples, train

DP4: Layout = {"tp": 1, "dp": 4, "pp": 1}
LAYOUTS: dict[str, Layout] = {
    "dp4": DP4,
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
]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="megascale-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


class _Killer(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Plan:
    """What an agent would give the ranks, and how one of them ends.

    place  "step": when the step is computed; else the name of a function of `slots` or of a method
           of `MemorySlots`, in which it ends in the step's save
    """

    memory: Path
    victim: int = -1
    step: int = 0
    place: str = "step"
    behind: bool = False
    per_node: int = 2

    def __call__(self, rank_loop: Loop) -> None:
        rank = int(os.environ["RANK"])
        node = self.memory / f"node{rank // self.per_node}"
        node.mkdir(exist_ok=True)
        os.environ["MEGASCALE_MEMORY_SLOTS"] = str(node / f"slots-{rank % self.per_node:03d}")
        if self.behind:
            _go_behind()
        if rank == self.victim:
            if self.place == "step":
                rank_loop.recorder.hooks.append(_Killer(self.step))
            else:
                _kill_in(self.place, rank_loop, self.step)


def _go_behind() -> None:
    """Hash and send behind training, as beside a GPU."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    made = slots.MemorySlots.__init__

    def make(self: slots.MemorySlots, *arguments: object, **named: object) -> None:
        named.update(is_behind=True, group_behind=group)
        made(self, *arguments, **named)  # type: ignore[arg-type]

    slots.MemorySlots.__init__ = make  # type: ignore[method-assign]


def _kill_in(place: str, rank_loop: Loop, step: int) -> None:
    owner = slots if hasattr(slots, place) else slots.MemorySlots
    original = getattr(owner, place)

    def die(*arguments: object) -> object:
        if rank_loop.progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(owner, place, die)


def _killed(folder: Path, layout: Layout, plan: Plan, *options: str, resume: bool = False) -> int:
    """Train until the victim dies; the last step whose loss was told."""
    with pytest.raises(AssertionError, match=r"died without a word|failed:"):
        train(folder, layout, [*SMALL, *options], resume=resume, plant=plan)
    return max(curve(folder), default=0)


def _resumed_at(folder: Path, layout: Layout, plan: Plan, *options: str) -> int:
    """Resume to the end; the step from which it went on."""
    num_before = len(metrics(folder))
    assert train(folder, layout, [*SMALL, *options], resume=True, plant=plan) == [None] * 4
    return metrics(folder)[num_before]["step"] - 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs without faults, of all layouts."""
    root = tmp_path_factory.mktemp("whole")
    for name, layout in LAYOUTS.items():
        train(root / name, layout, [*SMALL, "checkpoint.memory_interval=0"])
    return {name: root / name for name in LAYOUTS}


@pytest.mark.parametrize(
    ("layout", "victim", "step", "place"),
    [
        ("dp4", 0, 5, "step"),
        ("tp2-dp2", 3, 6, "_copy_out"),
        ("tp2-dp2", 1, 2, "crc_of"),
        ("dp4", 2, 4, "transfer"),
        ("tp2-pp2", 2, 7, "_finish"),
        ("tp2-pp2", 1, 3, "step"),
    ],
)
@pytest.mark.parametrize("behind", [False, True])
def test_killed_anywhere_at_most_a_step_is_done_again(
    whole: dict[str, Path],
    memory: Path,
    tmp_path: Path,
    layout: str,
    victim: int,
    step: int,
    place: str,
    behind: bool,
) -> None:
    run, plan = tmp_path / "run", Plan(memory, victim, step, place, behind)
    told = _killed(run, LAYOUTS[layout], plan)
    resumed = _resumed_at(run, LAYOUTS[layout], Plan(memory, behind=behind))
    assert resumed >= max(told, step - 1) - 1, f"killed in step {step}, told {told}"
    assert curve(run) == curve(whole[layout])
    assert_same_bits(run, whole[layout])
    assert samples(run) == samples(whole[layout])
