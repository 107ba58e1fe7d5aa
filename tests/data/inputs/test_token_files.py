"""Token files are taken as they are, documents joined, and refused where they do not fit."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from megascale.data import sources
from megascale.data.indexed import IndexedTokens, IndexedWriter
from megascale.data.inputs.documents import TokenDocument
from megascale.data.prepare import prepare
from megascale.data.tokenizer import TextTokenizer, train_bpe
from megascale.errors import DataError
from tests.data.inputs.reading import documents

_DOCUMENTS = [[i % 250 + 1] * (i % 7 + 1) for i in range(40)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    tokenizer = train_bpe(["some words, some more words\n"] * 9, 280)
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    return tokenizer


def _write(prefix: Path, wanted: list[list[int]], vocab_size: int = 280) -> Path:
    with IndexedWriter(prefix, vocab_size) as writer:
        for tokens in wanted:
            writer.add(np.array(tokens, np.int32), np.array([len(tokens)]))
    return prefix


def _two_sequences_a_document(prefix: Path) -> None:
    """[5 6 7 | 8 0] and [9 0], int64, as a split into sentences leaves it."""
    (prefix.parent / f"{prefix.name}.bin").write_bytes(struct.pack("<7q", 5, 6, 7, 8, 0, 9, 0))
    (prefix.parent / f"{prefix.name}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 5, 3, 3)
        + struct.pack("<3i", 3, 2, 2)
        + struct.pack("<3q", 0, 24, 40)
        + struct.pack("<3q", 0, 2, 3)
    )


@pytest.mark.parametrize("segment_bytes", [1, 30, 1 << 20])
@pytest.mark.parametrize("vocab_size", [280, 100_000])
def test_documents_in_any_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int, vocab_size: int
) -> None:
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", segment_bytes)
    prefix = _write(tmp_path / "x.v1", _DOCUMENTS, vocab_size)
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        read = documents(name)
        assert [d.tokens.tolist() for d in read if isinstance(d, TokenDocument)] == _DOCUMENTS


def test_both_files_of_a_pair_are_one_input(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("b", "a"):
        _write(folder / name, _DOCUMENTS)
    for inputs in ([str(folder)], [str(folder / "*")]):
        named = sources.list_inputs(inputs)
        assert named == [folder / "a.bin", folder / "b.bin"]


def test_tokens_and_text_make_one_corpus(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    end = tokenizer.end_of_document_id
    _two_sequences_a_document(tmp_path / "two")
    assert end == 0
    _write(tmp_path / "open", [[7, 8], [], [end], [3, end]])
    (tmp_path / "a.txt").write_text("some words")
    meta = prepare(
        [str(tmp_path / name) for name in ("two", "a.txt", "open")],
        str(tmp_path / "tokenizer"),
        tmp_path / "out",
        workers=1,
        validation_fraction=0.0,
    )
    stored = IndexedTokens(tmp_path / "out" / "train")
    assert [stored.document(i).tolist() for i in range(stored.num_documents)] == [
        [5, 6, 7, 8, end],
        [9, end],
        [*tokenizer.encode("some words"), end],
        [7, 8, end],
        [3, end],
    ]
    assert (meta.ends_added, meta.skipped_empty, meta.source_files) == (1, 2, 3)
    assert stored.dtype == np.uint16  # int64 in the one, uint16 in the other


def test_workers_and_cuts_do_not_change_the_result(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "x", _DOCUMENTS)
    outputs = [tmp_path / "one", tmp_path / "two"]
    for workers, output in enumerate(outputs, start=1):
        prepare(
            [str(tmp_path / "x")], str(tmp_path / "tokenizer"), output, workers=workers,
            validation_fraction=0.3,
        )  # fmt: skip
        monkeypatch.setattr(sources, "_SEGMENT_BYTES", 50)
    for name in ("train.bin", "train.idx", "valid.bin", "valid.idx"):
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes(), name


def _refused(tmp_path: Path, name: Path, match: str, spec: str = "") -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=match):
        prepare(
            [str(name)], spec or str(tmp_path / "tokenizer"), tmp_path / "out", workers=1,
            validation_fraction=0.0,
        )  # fmt: skip
    assert sorted(tmp_path.iterdir()) == before, "something was left behind"


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    size = tokenizer.vocab_size
    prefix = _write(tmp_path / "x", [[1, 2], [3, size, 4]])
    _refused(tmp_path, prefix, rf"x\.bin, document 1: token 1 is {size}, outside the vocabulary of")
    negative = _write(tmp_path / "y", [[1, -2]], vocab_size=100_000)
    _refused(tmp_path, negative, r"y\.bin, document 0: token 1 is -2, outside the vocabulary")


def test_a_vocabulary_cannot_be_learnt_from_tokens(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "x", _DOCUMENTS)
    _refused(tmp_path, prefix, r"x\.bin is tokens already; give the tokenizer", "train:BPE:300")


def test_half_written_files_are_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    prefix = _write(tmp_path / "x", _DOCUMENTS)
    idx, bin_ = tmp_path / "x.idx", tmp_path / "x.bin"
    whole = idx.read_bytes()
    idx.write_bytes(whole[:-8])
    _refused(tmp_path, prefix, r"x\.idx is cut short: expected \d+ bytes, found \d+; copy or")
    idx.write_bytes(whole[:20])
    _refused(tmp_path, prefix, r"x\.idx is cut short")
    idx.write_bytes(whole)
    bin_.write_bytes(bin_.read_bytes()[:-2])
    _refused(tmp_path, prefix, r"x\.bin is cut short: expected \d+ bytes, found \d+")
    idx.unlink()
    _refused(tmp_path, prefix, r"x\.bin has no x\.idx beside it, so it was not written to its end")
    bin_.rename(tmp_path / "y.bin")
    idx.write_bytes(whole)
    _refused(tmp_path, prefix, r"x\.idx has no x\.bin beside it")


def test_a_file_that_is_cut_meanwhile_is_told(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    _write(tmp_path / "x", _DOCUMENTS)
    tasks = list(sources.find_sources([str(tmp_path / "x")]).tasks())
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.bin changed while it was being read"):
        list(tasks[0][0].read())


def test_a_prepared_folder_is_not_text(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "a.txt").write_text("some words")
    prepare(
        [str(tmp_path / "a.txt")], str(tmp_path / "tokenizer"), tmp_path / "first", workers=1,
        validation_fraction=0.0,
    )  # fmt: skip
    _refused(tmp_path, tmp_path / "first", r"first is prepared already; .* name .*first/train")
    prepare(
        [str(tmp_path / "first" / "train")], str(tmp_path / "first"), tmp_path / "second",
        workers=1, validation_fraction=0.0,
    )  # fmt: skip
    for name in ("train.bin", "train.idx"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
