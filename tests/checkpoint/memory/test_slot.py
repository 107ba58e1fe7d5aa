"""A slot reads as complete only when it is, whenever its writer dies; its hash finds changes."""

from __future__ import annotations

import errno
import multiprocessing.connection
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint.memory import slot as slot_module
from megascale.checkpoint.memory.body import Body
from megascale.checkpoint.memory.hashing import Hasher
from megascale.checkpoint.memory.slot import HEADER_BYTES, MARK_AT, Header, Slot, Stamp
from megascale.errors import CheckpointError
from tests.checkpoint.layouts import whole
from tests.distributed import forkserver

SIZE = 1 << 20  # elements: a write takes about a millisecond


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megascale-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def _body(value: float, size: int = SIZE) -> Body:
    return Body(
        [whole("master/a", torch.full((size,), value)), whole("count", torch.tensor(value))]
    )


def _header(body: Body, slot: Slot, step: int) -> Header:
    return Header(
        stamp=Stamp(1, step, 7, step, 8 * step),
        owner=0,
        identity="run",
        layout="tensor 1",
        table_bytes=len(body.table),
        table_crc=body.table_crc,
        body_bytes=body.num_bytes,
        body_hash=Hasher().hash_of(slot.image[body.start :]),
    )


def _save(slot: Slot, step: int, size: int = SIZE) -> Header:
    body = _body(float(step), size)
    slot.allocate(body.image_bytes)
    slot.begin()
    slot.write_table(body.table)
    body.copy_out(slot.image)
    slot.finish(_header(body, slot, step))
    header = slot.header()
    assert header is not None
    return header


def _values(slot: Slot, size: int = SIZE) -> torch.Tensor:
    tensor = torch.zeros(size)
    body = Body([whole("master/a", tensor), whole("count", torch.tensor(0.0))])
    body.filling().put(0, slot.image[body.start :])
    return tensor


def test_what_was_saved_is_read_by_another_process(memory: Path) -> None:
    written = _save(Slot(memory / "slot"), 3, size=100)
    again = Slot(memory / "slot")
    assert again.header() == written
    assert again.is_whole(written, Hasher())
    assert _values(again, 100).tolist() == [3.0] * 100
    assert (memory / "slot").stat().st_size == written.image_bytes


def test_later_saves_are_greater_whatever_their_step() -> None:
    stamps = [Stamp(1, 5, 9, 7, 56), Stamp(1, 6, 2, 3, 24), Stamp(2, 6, 1, 1, 8)]
    assert sorted({*stamps}) == stamps


def _flip_two_signs(image: bytearray) -> None:
    for place in (-69, -77):
        image[place] ^= 128


DAMAGES: dict[str, tuple[Callable[[bytearray], None], bool]] = {
    "a value": (lambda image: image.__setitem__(-5, image[-5] ^ 1), True),
    "the table": (lambda image: image.__setitem__(HEADER_BYTES + 3, 0), True),
    "the header": (lambda image: image.__setitem__(40, image[40] ^ 1), False),
    "the magic": (lambda image: image.__setitem__(0, 0), False),
    "the version": (lambda image: image.__setitem__(7, 9), False),
    "the mark": (lambda image: image.__setitem__(MARK_AT, 0), False),
    "two signs": (_flip_two_signs, True),
    "the end": (lambda image: image.__delitem__(slice(-8, None)), False),
    "all": (lambda image: image.clear(), False),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(memory: Path, damage: str) -> None:
    """In the header at once, in the rest by its hash."""
    path = memory / "slot"
    written = _save(Slot(path), 3, size=100)
    inflict, has_header = DAMAGES[damage]
    image = bytearray(path.read_bytes())
    inflict(image)
    path.write_bytes(image)
    slot = Slot(path)
    assert slot.header() == (written if has_header else None)
    if has_header:
        assert not slot.is_whole(written, Hasher())


def test_no_file_is_no_slot(memory: Path) -> None:
    slot = Slot(memory / "absent")
    assert slot.header() is None
    slot.begin()
    slot.release()
    assert list(memory.iterdir()) == []


def test_a_slot_of_another_size_is_made_anew(memory: Path) -> None:
    slot = Slot(memory / "slot")
    _save(slot, 3, size=100)
    slot.allocate(8192)
    assert slot.header() is None
    assert slot.image.shape == (8192,)
    assert not slot.image.any()


class _Runtime:
    """CUDA's, as far as a slot asks it: an address that is registered still is refused."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, _num_bytes: int, _flags: int) -> int:
        if address in self.registered:
            return 712
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)


def test_memory_that_goes_is_not_registered_any_more(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = _Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slot = Slot(memory / "slot")
    slot.allocate(8192)
    assert slot.register() == 0
    assert len(runtime.registered) == 1
    slot.allocate(4096)  # anew
    assert not runtime.registered
    assert slot.register() == 0
    del slot
    assert not runtime.registered


def test_no_room_is_told_with_numbers_and_takes_nothing(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"slot needs 9,999 bytes, .* free; make /dev/shm la"):
        Slot(memory / "slot").allocate(9999)
    assert list(memory.iterdir()) == []


def test_more_than_there_is_is_refused(memory: Path) -> None:
    space = os.statvfs(memory)
    with pytest.raises(CheckpointError, match="make /dev/shm larger"):
        Slot(memory / "slot").allocate(space.f_blocks * space.f_frsize + (1 << 30))
    assert list(memory.iterdir()) == []


def test_a_folder_that_is_not_there_is_told(memory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone/slot cannot be made \(No such file"):
        Slot(memory / "gone" / "slot").allocate(100)


# ---------------------------------------------------------------- killed


def _write_for_ever(folder: str, pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    slots = [Slot(Path(folder) / name) for name in ("own0", "own1")]
    for step in range(1, 1 << 30):
        _save(slots[step % 2], step)
        pipe.send(step)


@pytest.mark.parametrize("seed", range(10))
def test_killed_in_mid_write_the_other_slot_is_whole(memory: Path, seed: int) -> None:
    """Ten kills at random moments, and after each the newest that was told of, or a later one."""
    receiver, sender = forkserver.Pipe(duplex=False)
    writer = forkserver.Process(target=_write_for_ever, args=(str(memory), sender))
    writer.start()
    sender.close()
    told = receiver.recv()
    time.sleep(random.Random(seed).uniform(0.0, 0.05))
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    try:
        while True:
            told = receiver.recv()
    except EOFError:
        pass
    complete = {}
    for name in ("own0", "own1"):
        slot = Slot(memory / name)
        header = slot.header()
        if header is not None:
            assert slot.is_whole(header, Hasher()), name
            assert _values(slot).unique().tolist() == [float(header.stamp.step)]
            complete[header.stamp.step] = name
    assert complete, "no slot is complete"
    assert max(complete) in (told, told + 1), (complete, told)


@pytest.mark.parametrize("num_done", range(4))
def test_a_writer_that_ended_on_its_way_leaves_no_mark(memory: Path, num_done: int) -> None:
    """After each part of a second save, up to the last."""
    slot = Slot(memory / "slot")
    old = _save(slot, 1, size=100)
    body = _body(2.0, 100)
    parts: list[Callable[[], None]] = [
        slot.begin,
        lambda: slot.write_table(body.table),
        lambda: body.copy_out(slot.image),
        lambda: slot.finish(_header(body, slot, 2)),
    ]
    for part in parts[: num_done + 1]:
        part()
    new = Slot(memory / "slot").header()
    if num_done < 3:
        assert new is None
    else:
        assert new == replace(
            old, stamp=Stamp(1, 2, 7, 2, 16), body_hash=new.body_hash if new else ""
        )


def test_pages_are_mapped_by_threads_and_keep_what_they_hold(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_module, "_POPULATED_BYTES", 1 << 16)
    for slot in (Slot(memory / "slot"), Slot(None)):
        slot.allocate(5 * (1 << 16) + 4096)
        slot.image[-1], slot.image[0] = 7, 3
        slot.populate(3)
        assert slot.image[[0, -1]].tolist() == [3, 7]
        assert int(slot.image.sum()) == 10
