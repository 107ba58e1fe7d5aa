"""Slots of one rank: what is kept is the state at the moment of `begin`, and the newest counts."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory import MemorySlots
from megascale.checkpoint.memory.hashing import CHUNK_BYTES, Arrival
from megascale.checkpoint.memory.slot import Slot
from megascale.errors import CheckpointError
from megascale.topology import Mesh
from tests.checkpoint.layouts import whole

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megascale-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def _open(
    memory: Path, values: Tensor, *, is_behind: bool = False, epoch: int = 1, num_own: int = 2
) -> MemorySlots:
    return MemorySlots(
        str(memory / "slots-000"),
        [whole("master/a", values)],
        [],
        Mesh(),
        Ranks(None),
        identity="run",
        epoch=epoch,
        device=values.device,
        is_behind=is_behind,
        num_own=num_own,
    )


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_what_follows_the_copy_does_not_change_it(
    memory: Path, device: str, is_behind: bool
) -> None:
    values = torch.zeros(1 << 22, device=device)
    slots = _open(memory, values, is_behind=is_behind)
    for step in range(1, 5):
        values.fill_(step)
        slots.begin(step, 8 * step)
        slots.before_update()
        values.mul_(-1.0)  # as the next update: launched at once
        slots.settled()
    slots.join()
    assert device == "cpu" or all(slot.image.is_pinned() for slot in slots._ring.slots)
    found = torch.zeros(1 << 22, device=device)
    again = _open(memory, found, is_behind=is_behind, epoch=2)
    stamp = again.restore(3)
    assert stamp is not None
    assert (stamp.step, stamp.consumed_samples, stamp.epoch, stamp.number) == (4, 32, 1, 4)
    assert found.unique().tolist() == [4.0]


@pytest.mark.gpu
def test_the_copy_runs_beside_the_next_step_and_the_update_waits_for_it(memory: Path) -> None:
    values = torch.zeros(1 << 27, device="cuda")  # 512 MiB
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    slots = _open(memory, values)
    slots.begin(1, 8)  # makes room, which takes long
    slots.before_update()

    def ms(*, products: int, step: int | None) -> float:
        """Of the device, for a step: forward and backward, the update; with a copy if `step`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)  # the host is ahead
        start.record()
        if step is not None:
            slots.begin(step, 8 * step)
        for _ in range(products):
            factor @ factor
        slots.before_update()
        values.fill_(-1.0)
        end.record()
        end.synchronize()
        if step is not None:
            slots.settled()
        return float(start.elapsed_time(end))

    ms(products=10, step=None)
    copy = ms(products=0, step=2)
    products = 1 + int(20 * copy / ms(products=10, step=None))  # twice as long as the copy
    without = ms(products=products, step=None)
    values.fill_(3.0)
    beside = ms(products=products, step=3)
    print(f"a copy {copy:.1f} ms, a step {without:.1f} ms, both {beside:.1f} ms")
    assert beside < without + 0.3 * copy, "the copy is not hidden"
    found = torch.zeros_like(values)
    stamp = _open(memory, found, epoch=2).restore(None)
    assert stamp is not None
    assert stamp.step == 3
    assert found.unique().tolist() == [3.0], "the update did not wait"


def test_what_was_not_settled_does_not_count(memory: Path) -> None:
    values = torch.ones(100)
    slots = _open(memory, values)
    slots.begin(1, 8)
    slots.settled()
    values.fill_(2.0)
    slots.begin(2, 16)
    found = torch.zeros(100)
    stamp = _open(memory, found).restore(None)
    assert stamp is not None
    assert (stamp.step, found[0].item()) == (1, 1.0)


def test_the_save_that_was_restored_stays_until_a_later_one_is_whole(memory: Path) -> None:
    values = torch.ones(100)
    slots = _open(memory, values)
    for step in (1, 2):
        slots.begin(step, step)
        slots.settled()
    again = _open(memory, values, epoch=2)
    assert again.restore(None) is not None
    again.begin(3, 3)  # and is killed
    last = _open(memory, torch.zeros(100), epoch=3).restore(None)
    assert last is not None
    assert last.step == 2


def test_numbers_go_on_over_starts(memory: Path) -> None:
    values = torch.ones(100)
    numbers = []
    for epoch, step in ((1, 5), (2, 3), (2, 1)):
        slots = _open(memory, values, epoch=epoch)
        slots.begin(step, step)
        slots.settled()
        stamp = _open(memory, values).restore(None)
        assert stamp is not None
        numbers.append((stamp.number, stamp.step))
    assert numbers == [(1, 5), (2, 3), (3, 1)]


def test_forgotten_slots_are_not_found(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = torch.ones(100)
    slots = _open(memory, values)
    slots.begin(1, 8)
    slots.settled()
    slots.begin(2, 16)
    slots.forget()
    slots.settled()  # of what was forgotten
    assert _open(memory, values).restore(None) is None
    assert "memory slots are not used: no rank holds a complete one" in caplog.text
    slots.begin(3, 24)
    slots.settled()
    assert _open(memory, values).restore(None) is not None


def test_an_error_behind_training_reaches_it(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = _open(memory, torch.ones(100), is_behind=True)
    slots.begin(1, 8)

    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(slots, "_finish", fail)
    slots.settled()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        slots.begin(2, 16)


def test_a_save_that_never_ends_is_told(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = _open(memory, torch.ones(100), is_behind=True)
    slots.begin(1, 8)
    ends = threading.Event()
    monkeypatch.setattr(slots, "_finish", lambda _: ends.wait(10.0))
    monkeypatch.setattr(slots, "_most_s", 0.05)
    slots.settled()
    with pytest.raises(CheckpointError, match="a save to memory has not ended in 0 s"):
        slots.join()
    ends.set()


def test_slots_of_a_start_that_had_more_are_used_and_then_given_back(memory: Path) -> None:
    values = torch.ones(100)
    slots = _open(memory, values, num_own=4)
    for step in range(1, 5):
        values.fill_(step)
        slots.begin(step, step)
        slots.settled()
    assert Slot(memory / "slots-000.own3").header() is not None
    again = _open(memory, values, epoch=2)
    stamp = again.restore(None)
    assert stamp is not None
    assert (stamp.step, values.unique().tolist()) == (4, [4.0])
    assert (memory / "slots-000.own3").exists(), "the only one that has step 4"
    again.begin(5, 5)
    again.settled()
    assert sorted(path.name for path in memory.iterdir()) == ["slots-000.own0", "slots-000.own1"]


def test_room_that_is_made_behind_training_is_there_at_the_first_save(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    values = torch.ones(1 << 20)
    slots = _open(memory, values)
    slots.prepare()
    slots.prepare()
    assert caplog.text.count("of a node's memory: 1 rank(s), each 2 slot(s) of 4,") == 1
    slots.forget()
    slots.begin(1, 8)
    slots.settled()
    assert slots.restore(None) is not None


@pytest.mark.parametrize("is_behind", [False, True])
def test_values_that_arrive_behind_begin_are_hashed_as_they_do(
    memory: Path, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    """As from a device: nothing is in the slot when `begin` returns."""
    values = torch.arange(3 * CHUNK_BYTES // 4 + 5, dtype=torch.float32)
    gate = threading.Event()

    def copy_late(self: MemorySlots, image: Tensor) -> tuple[None, list[Arrival]]:
        source, kept = values.view(torch.uint8), image[self._body.start :]

        def arrive(start: int, stop: int) -> None:
            assert gate.wait(10.0)
            kept[start:stop] = source[start:stop]

        stops = [CHUNK_BYTES + 8, 2 * CHUNK_BYTES, len(source)]
        return None, [
            Arrival(stop, partial(arrive, start, stop))
            for start, stop in zip([0, *stops], stops, strict=False)
        ]

    monkeypatch.setattr(MemorySlots, "_copy_out", copy_late)
    slots = _open(memory, values, is_behind=is_behind)
    slots.begin(3, 24)
    begun = slots._begun
    assert begun is not None
    assert begun.hashed is not None, "hashing waits for the step to settle"
    assert not begun.hashed.done()
    gate.set()
    begun.hashed.result(10.0)
    assert begun.slot.header() is None, "it counts before the step has settled"
    slots.settled()
    slots.join()
    found = torch.zeros_like(values)
    stamp = _open(memory, found, epoch=2).restore(None)
    assert stamp is not None
    assert stamp.step == 3
    assert torch.equal(found, values)
