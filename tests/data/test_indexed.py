"""The token files' byte layout is Megatron's, and damaged files are refused by their size."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megascale.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from megascale.errors import DataError


def _hand_built_idx(code: int = 8, magic: bytes = b"MMIDIDX\x00\x00", version: int = 1) -> bytes:
    """Sequences [5 6 7] [8] [9 10] in two documents: the first has two, as a sentence split."""
    return (
        magic
        + struct.pack("<Q", version)
        + struct.pack("<B", code)
        + struct.pack("<Q", 3)
        + struct.pack("<Q", 3)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<3q", 0, 2, 3)
    )


def _hand_built(folder: Path, idx: bytes | None = None, bin_: bytes | None = None) -> Path:
    (folder / "x.v1.idx").write_bytes(_hand_built_idx() if idx is None else idx)
    tokens = struct.pack("<6H", 5, 6, 7, 8, 9, 10)
    (folder / "x.v1.bin").write_bytes(tokens if bin_ is None else bin_)
    return folder / "x.v1"


def test_reads_a_hand_built_file(tmp_path: Path) -> None:
    file = IndexedTokens(_hand_built(tmp_path))
    assert file.dtype == np.uint16
    assert file.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert file.lengths.tolist() == [3, 1, 2]
    assert file.num_documents == 2
    assert [file.document(i).tolist() for i in range(2)] == [[5, 6, 7, 8], [9, 10]]
    assert file.document_offsets().tolist() == [0, 4, 6]


def test_writes_megatrons_bytes(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "y", vocab_size=4096) as writer:
        writer.add(np.array([5, 6, 7, 8]), np.array([3, 1]))
        writer.add(np.array([9, 10]), np.array([2]))
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert (tmp_path / "y.idx").read_bytes() == expected
    assert (tmp_path / "y.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, "uint16"), (65500, "int32")])
def test_dtype_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)
    tokens = np.array([0, vocab_size - 1])
    with IndexedWriter(tmp_path / "z", vocab_size) as writer:
        writer.add(tokens, np.array([2]))
    file = IndexedTokens(tmp_path / "z")
    assert file.dtype == np.dtype(dtype)
    assert file.tokens.tolist() == tokens.tolist()


def test_a_failed_writer_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(tmp_path / "w", 10):
        raise RuntimeError("stop")
    with pytest.raises(DataError, match=r"w\.idx does not exist"):
        IndexedTokens(tmp_path / "w")


def test_tokens_cut_short_are_refused_with_both_sizes(tmp_path: Path) -> None:
    prefix = _hand_built(tmp_path, bin_=struct.pack("<5H", 5, 6, 7, 8, 9))
    with pytest.raises(DataError, match=r"bin is cut short: expected 12 bytes, found 10"):
        IndexedTokens(prefix)


def test_tokens_of_another_index_are_refused(tmp_path: Path) -> None:
    prefix = _hand_built(tmp_path, bin_=bytes(14))
    with pytest.raises(DataError, match=r"does not match its index: expected 12 bytes, found 14"):
        IndexedTokens(prefix)


@pytest.mark.parametrize("kept", [0, 20, 34, 60, len(_hand_built_idx()) - 1])
def test_an_index_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    prefix = _hand_built(tmp_path, idx=_hand_built_idx()[:kept])
    expected = 34 if kept < 34 else len(_hand_built_idx())
    with pytest.raises(
        DataError, match=f"idx is cut short: expected {expected} bytes, found {kept}"
    ):
        IndexedTokens(prefix)


_DISAGREEMENTS = {  # place of the changed number in the hand-built index: lengths from 34 on
    "length": (34, "<i", 2, "offsets are not the running sum"),
    "negative length": (38, "<i", -1, "a negative length"),
    "first offset": (46, "<q", 2, "offsets are not the running sum"),
    "offset": (54, "<q", 1 << 40, "offsets are not the running sum"),
    "last offset": (62, "<q", 6, "offsets are not the running sum"),
    "first document": (70, "<q", 1, "do not span its 3 sequences"),
    "document": (78, "<q", 255, "ends before it begins"),
    "last document": (86, "<q", 4, "do not span its 3 sequences"),
}


@pytest.mark.parametrize("what", _DISAGREEMENTS)
def test_an_index_that_contradicts_itself_is_refused(tmp_path: Path, what: str) -> None:
    place, kind, value, message = _DISAGREEMENTS[what]
    idx = bytearray(_hand_built_idx())
    struct.pack_into(kind, idx, place, value)
    with pytest.raises(DataError, match=rf"x\.v1\.idx is damaged: .*{message}"):
        IndexedTokens(_hand_built(tmp_path, idx=bytes(idx)))


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        (_hand_built_idx(magic=b"TNTIDX\x00\x00\x00"), "not a token index"),
        (_hand_built_idx(version=2), "format version 2"),
        (_hand_built_idx(code=7), "dtype code 7"),
        (_hand_built_idx(code=99), "dtype code 99"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 1) + bytes(8), "no sequences"),
        (
            b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2) + bytes(12) + bytes(16),
            "no tokens",
        ),
    ],
)
def test_what_is_no_token_file_is_refused(tmp_path: Path, idx: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        IndexedTokens(_hand_built(tmp_path, idx=idx))


def test_tokens_are_read_from_anywhere(tmp_path: Path) -> None:
    file = IndexedTokens(_hand_built(tmp_path))
    assert file.read(0, 6).tolist() == [5, 6, 7, 8, 9, 10]
    assert file.read(2, 5).tolist() == [7, 8, 9]


def test_a_file_that_is_cut_short_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    prefix = _hand_built(tmp_path)
    file = IndexedTokens(prefix)
    os.truncate(f"{prefix}.bin", 8)
    assert file.read(0, 4).tolist() == [5, 6, 7, 8]
    with pytest.raises(DataError, match=r"x\.v1\.bin was cut short .* has no token 5 any more"):
        file.read(3, 6)


def test_a_storage_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = IndexedTokens(_hand_built(tmp_path))

    def fail(*_args: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(DataError, match=r"x\.v1\.bin cannot be read \(Input/output error\); look"):
        file.read(0, 1)


def test_a_file_is_closed_with_its_reader(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = IndexedTokens(_hand_built(tmp_path))
    assert len(os.listdir("/proc/self/fd")) > before
    del file
    assert len(os.listdir("/proc/self/fd")) == before
