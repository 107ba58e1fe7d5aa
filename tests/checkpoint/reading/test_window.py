"""Blocks come in order, checked, and only so many are in memory."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

from megascale.checkpoint.reading.window import DamagedError, Source, Window, make_buffer
from megascale.errors import CheckpointError, StorageError
from tests.checkpoint.reading.saving import CountingFolder

BLOCK = 4096


def _file(root: Path, num_blocks: int) -> list[Source]:
    data = bytes(i * i % 251 for i in range(num_blocks * BLOCK - 100))
    (root / "f").write_bytes(data)
    blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    return [
        Source("f", number * BLOCK, len(block), hashlib.sha256(block).hexdigest())
        for number, block in enumerate(blocks)
    ]


def test_in_order_though_threads_end_as_they_like(tmp_path: Path) -> None:
    sources = _file(tmp_path, 40)

    def before(_name: str, start: int) -> None:
        time.sleep(0.002 * (start // BLOCK % 3 == 0))

    window = Window(CountingFolder(tmp_path, before=before), sources, block_bytes=BLOCK)
    got = b""
    for _ in sources:
        buffer, block = window.next(10)
        got += bytes(block.tolist())
        window.release(buffer)
    window.close()
    assert got == (tmp_path / "f").read_bytes()


def test_no_more_is_read_than_there_is_room_for(tmp_path: Path) -> None:
    sources = _file(tmp_path, 40)
    storage = CountingFolder(tmp_path)
    window = Window(storage, sources, block_bytes=BLOCK, num_threads=2)
    deadline_s = time.monotonic() + 5
    while len(storage.ranges) < 6 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(storage.ranges) == 6  # 2 threads and 4 ahead
    buffer, _ = window.next(10)
    assert len(storage.ranges) == 6
    window.release(buffer)
    while len(storage.ranges) < 7 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(storage.ranges) == 7
    window.close()


def test_other_bytes_are_damage(tmp_path: Path) -> None:
    sources = _file(tmp_path, 3)
    data = bytearray((tmp_path / "f").read_bytes())
    data[BLOCK + 5] ^= 0x10
    (tmp_path / "f").write_bytes(data)
    window = Window(CountingFolder(tmp_path), sources, block_bytes=BLOCK)
    window.next(10)
    with pytest.raises(DamagedError, match=r"/f: bytes 4,096 to 8,192 have SHA-256"):
        window.next(10)
    window.close()


def test_a_file_that_ends_early_is_the_storages_error(tmp_path: Path) -> None:
    sources = _file(tmp_path, 3)
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[: 2 * BLOCK + 7])
    window = Window(CountingFolder(tmp_path), sources[2:], block_bytes=BLOCK)
    with pytest.raises(StorageError, match="f ends at byte 8,199"):
        window.next(10)
    window.close()


def test_a_read_that_hangs_is_given_up(tmp_path: Path) -> None:
    sources, go_on = _file(tmp_path, 1), threading.Event()

    def before(_name: str, _start: int) -> None:
        go_on.wait(20)

    storage = CountingFolder(tmp_path, before=before)
    window = Window(storage, sources, block_bytes=BLOCK)
    with pytest.raises(CheckpointError, match="/f was not read in time; look at the storage"):
        window.next(0.1)
    window.close()
    go_on.set()


def test_buffers_begin_at_a_page() -> None:
    buffer = make_buffer(3 * BLOCK, pinned=False)
    assert buffer.tensor.data_ptr() % 4096 == 0
    buffer.view[:3] = b"abc"
    assert bytes(buffer.tensor[:3].tolist()) == b"abc"
