"""Blocks that are held to their hashes: a flipped bit, a truncated file, a wrong table."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megascale.errors import CheckpointError
from megascale.storage import BLOCK_BYTES, check_file, open_storage, page_aligned, read_block
from megascale.storage.blocks import blocks_in_order
from tests.storage.contract import content

HEADER = content(4096, seed=1)
VALUES = content(2 * BLOCK_BYTES + 100)
BLOCKS = [
    hashlib.sha256(VALUES[start : start + BLOCK_BYTES]).hexdigest()
    for start in range(0, len(VALUES), BLOCK_BYTES)
]
SHA256 = hashlib.sha256(HEADER).hexdigest()
NUM_BYTES = len(HEADER) + len(VALUES)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rank-0"
    path.write_bytes(HEADER + VALUES)
    return path


def check(file: Path, blocks: list[str] = BLOCKS, num_bytes: int = NUM_BYTES) -> int:
    moved: list[int] = []
    storage = open_storage(file.parent)
    check_file(storage, file.name, num_bytes, len(HEADER), SHA256, blocks, moved=moved.append)
    return sum(moved)


def test_a_file_as_it_was_written_passes(file: Path) -> None:
    assert check(file) == NUM_BYTES


@pytest.mark.parametrize(
    ("position", "said"),
    [
        (4095, "bytes 0 to 4,096"),
        (4096, "bytes 4,096 to 16,781,312"),
        (4096 + BLOCK_BYTES, "bytes 16,781,312 to 33,558,528"),
        (NUM_BYTES - 1, "bytes 33,558,528 to 33,558,628"),
    ],
)
def test_a_flipped_bit_is_found_where_it_is(file: Path, position: int, said: str) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        (byte,) = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointError, match=f"rank-0 is damaged: {said} have SHA-256"):
        check(file)


def test_another_length_or_another_table_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 3 blocks, hashes were kept of 2"):
        check(file, BLOCKS[:2])
    with file.open("r+b") as opened:
        opened.truncate(NUM_BYTES - 1)
    with pytest.raises(CheckpointError, match="has 33,558,627 bytes, not 33,558,628"):
        check(file)
    file.unlink()
    with pytest.raises(CheckpointError, match="rank-0 is missing"):
        check(file)


def test_a_block_is_read_into_place_and_a_wrong_one_raises(file: Path) -> None:
    storage = open_storage(file.parent)
    out = page_aligned(100)
    start = len(HEADER) + 2 * BLOCK_BYTES
    read_block(storage, file.name, start, out, BLOCKS[2])
    assert bytes(out) == VALUES[2 * BLOCK_BYTES :]
    with pytest.raises(CheckpointError, match="is damaged"):
        read_block(storage, file.name, start, out, BLOCKS[0])


@pytest.mark.parametrize("header_bytes", [0, 4096])
def test_blocks_come_in_order_with_their_hashes(file: Path, header_bytes: int) -> None:
    hashes: list[str] = []
    parts = [
        bytes(part)
        for part in blocks_in_order(
            open_storage(file.parent), file.name, header_bytes, NUM_BYTES, hashes
        )
    ]
    assert b"".join(parts) == HEADER + VALUES
    assert hashes == [hashlib.sha256(part).hexdigest() for part in parts]
    if header_bytes:
        assert hashes == [SHA256, *BLOCKS]
