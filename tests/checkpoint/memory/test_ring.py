"""Held slots and the newest whole save are never written, and no save is dropped."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.layout import encode_header
from megascale.checkpoint.memory import MemorySlots
from megascale.checkpoint.memory.hashing import Hasher
from megascale.checkpoint.memory.ring import Ring
from megascale.checkpoint.memory.slot import Header, Slot, Stamp
from megascale.checkpoint.staged import Staged
from megascale.errors import CheckpointError
from megascale.topology import Mesh
from tests.checkpoint.layouts import whole
from tests.checkpoint.memory.test_slots import memory

__all__ = ["memory"]
NUM_VALUES = 1 << 16


def _open(prefix: str | None, values: Tensor, *, num_own: int, is_behind: bool) -> MemorySlots:
    return MemorySlots(
        prefix,
        [whole("master/a", values)],
        [whole("count", torch.tensor(0))],
        Mesh(),
        Ranks(None),
        identity="run",
        epoch=1,
        device=values.device,
        num_own=num_own,
        is_behind=is_behind,
    )


def _values(staged: Staged, start: int, stop: int) -> Tensor:
    """Elements of what is held, as the process reads them that writes it."""
    with staged.path.open("rb") as file:
        file.seek(staged.start + 4 * start)
        return torch.frombuffer(bytearray(file.read(4 * (stop - start))), dtype=torch.float32)


class _SlowWriter(threading.Thread):
    """Reads what is held a tenth at a time, while steps go on."""

    def __init__(self, staged: Staged, pause_s: float) -> None:
        super().__init__()
        self.staged, self.pause_s = staged, pause_s
        self.seen: set[float] = set()
        self.start()

    def run(self) -> None:
        self.staged.wait()
        for part in range(10):
            start, stop = NUM_VALUES * part // 10, NUM_VALUES * (part + 1) // 10
            self.seen |= {*_values(self.staged, start, stop).tolist()}
            time.sleep(self.pause_s)
        self.staged.release()


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("num_own", [2, 3])
def test_a_slow_writer_gets_one_state_and_every_step_is_kept(
    memory: Path, num_own: int, is_behind: bool
) -> None:
    """Forty steps; whenever a writer is done the next takes the state of that moment."""
    values = torch.zeros(NUM_VALUES)
    slots = _open(str(memory / "slots"), values, num_own=num_own, is_behind=is_behind)
    writers: list[_SlowWriter] = []
    for step in range(1, 41):
        values.fill_(step)
        slots.begin(step, step)
        if not writers or not writers[-1].is_alive():
            staged = slots.hold()
            assert staged is not None
            assert (staged.step, staged.num_bytes) == (step, 4 * NUM_VALUES)
            writers.append(_SlowWriter(staged, pause_s=0.002))
        slots.before_update()
        values.fill_(-1.0)
        slots.settled()
        slots.join()
        kept = [header for slot in slots._ring.slots if (header := slot.header())]
        newest = max(kept, key=lambda header: header.stamp)
        assert newest.stamp.step == step, "dropped"
        time.sleep(0.001)
    for writer in writers:
        writer.join()
        assert writer.seen == {float(writer.staged.step)}
    assert len(writers) > 2
    assert (slots.waits.num > 0) == (num_own == 2), "two slots wait for the writer, three do not"


def test_a_state_in_memory_of_the_trainer_alone(memory: Path) -> None:
    """One slot without a file: another process writes it as it lies; the next save waits for it."""
    values = torch.arange(1000.0)
    slots = _open(None, values, num_own=1, is_behind=False)
    slots.begin(3, 24)
    staged = slots.hold()
    assert staged is not None
    assert staged.start % 4096 == 0
    slots.settled()
    staged.wait()
    program = (
        "import sys, mmap; file = open(sys.argv[1], 'rb'); image = mmap.mmap(file.fileno(), 0, "
        "prot=mmap.PROT_READ); start = int(sys.argv[2]); "
        "sys.stdout.buffer.write(image[start : start + int(sys.argv[3])])"
    )
    arguments = [str(staged.path), str(staged.start), str(staged.num_bytes)]
    written = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, check=True
    ).stdout
    assert torch.equal(torch.frombuffer(bytearray(written), dtype=torch.float32), values)
    assert torch.equal(load(encode_header(staged.entries) + written)["master/a@0"], values)
    threading.Timer(0.2, staged.release).start()
    since = time.monotonic()
    slots.begin(4, 32)
    assert time.monotonic() - since > 0.15
    assert (slots.waits.num, slots.waits.total_s > 0.15) == (1, True)
    slots.settled()
    assert slots.restore(None) is None, "nothing outlives this process"
    assert list(memory.iterdir()) == []


def test_a_state_that_is_not_settled_is_waited_for_and_may_never_come(memory: Path) -> None:
    slots = _open(str(memory / "slots"), torch.ones(10), num_own=3, is_behind=True)
    slots.begin(1, 1)
    first = slots.hold()
    assert first is not None
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    slots.settled()
    waiting.join(5.0)
    assert not waiting.is_alive()
    slots.begin(2, 2)
    second = slots.hold()
    assert second is not None
    slots.forget()
    with pytest.raises(CheckpointError, match="step 2 was not kept: the run went back"):
        second.wait()
    first.wait()  # it was settled, and is held still
    assert slots.hold() is None
    slots.begin(1, 1)
    third = slots.hold()
    assert third is not None
    assert len({first.path, second.path, third.path}) == 3
    first.release()
    with pytest.raises(AssertionError, match="twice"):
        first.release()


def test_who_holds_for_ever_is_told(memory: Path) -> None:
    slots = [Slot(memory / f"own{number}") for number in range(2)]
    ring = Ring(slots, timeout_s=0.05)
    ring.hold(slots[0])
    ring.hold(slots[1])
    with pytest.raises(CheckpointError, match="2 of 2 are held by checkpoints that are being"):
        ring.next(None)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_holds_and_saves_writes_what_must_stay(memory: Path, seed: int) -> None:
    """Held slots and the newest whole save keep their stamps; the next slot is the oldest other."""
    rng = random.Random(seed)
    slots = [Slot(memory / f"own{number}") for number in range(rng.randint(2, 4))]
    for slot in slots:
        slot.allocate(8192)
    ring = Ring(slots, timeout_s=0.0)
    complete: Stamp | None = None
    held: dict[Slot, list[tuple[Stamp, object]]] = {slot: [] for slot in slots}
    for number in range(1, 60):
        holders = [(slot, hold) for slot, holds in held.items() for hold in holds]
        if holders and rng.random() < 0.5:
            slot, hold = rng.choice(holders)
            held[slot].remove(hold)
            hold[1]()  # type: ignore[operator]
        kept = {slot: h.stamp for slot in slots if (h := slot.header()) is not None}
        free = [s for s in slots if not held[s] and (s not in kept or kept[s] != complete)]
        if not free:
            with pytest.raises(CheckpointError):
                ring.next(complete)
            continue
        slot, _ = ring.next(complete)
        assert slot in free
        assert slot not in kept or all(s in kept and kept[slot] <= kept[s] for s in free)
        slot.begin()
        if rng.random() < 0.8:  # else it is not settled
            stamp = Stamp(1, number, 7, number, number)
            slot.finish(Header(stamp, 0, "run", "", 0, 0, 4096, Hasher().hash_of(slot.image)))
            complete = stamp
            if rng.random() < 0.4:
                held[slot].append((stamp, ring.hold(slot)))
        for slot, holds in held.items():
            for stamp, _ in holds:
                header = slot.header()
                assert header is not None
                assert header.stamp == stamp, "written while it was held"
