"""Packed samples against a plain loop over documents; synthetic samples as a pure function."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.data.indexed import IndexedWriter, token_dtype
from megascale.data.prepared import FORMAT_VERSION, Meta, SplitMeta
from megascale.data.samples import PackedDataset, Packing, SyntheticDataset
from megascale.errors import DataError

_END = 0


def prepared_folder(folder: Path, documents: list[list[int]], vocab_size: int = 100) -> Path:
    """A prepared folder with one split, `train`, of `documents` and no tokenizer."""
    with IndexedWriter(folder / "train", vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document), np.array([len(document)]))
    meta = Meta(
        format_version=FORMAT_VERSION,
        tokenizer_sha256="0" * 64,
        vocab_size=vocab_size,
        end_of_document_id=_END,
        splits={"train": SplitMeta(sum(map(len, documents)), len(documents))},
        unigram_entropy_nats=1.0,
        valid_unigram_cross_entropy_nats=None,
        skipped_undecodable=0,
        skipped_empty=0,
        source_files=1,
        documents_sha256="",
        seed=0,
        validation_fraction=0.0,
        command="megascale data prepare",
    )
    meta.write(folder)
    return folder


_documents = st.lists(
    st.lists(st.integers(1, 99), max_size=12).map(lambda text: [*text, _END]), min_size=1
)


@given(documents=_documents, seq_len=st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_concat_is_the_joined_tokens_cut(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], seq_len: int
) -> None:
    joined = [token for document in documents for token in document]
    folder = prepared_folder(tmp_path_factory.mktemp("data"), documents)
    count = (len(joined) - 1) // seq_len
    if count == 0:
        with pytest.raises(DataError, match="less than one sample"):
            PackedDataset(folder, "train", seq_len)
        return
    dataset = PackedDataset(folder, "train", seq_len)
    assert len(dataset) == count
    for i in range(count):
        sample, start = dataset[i], i * seq_len
        assert sample.tokens_S.tolist() == joined[start : start + seq_len]
        assert sample.labels_S.tolist() == joined[start + 1 : start + seq_len + 1]
        assert sample.loss_mask_S.tolist() == [1.0] * seq_len


@given(documents=_documents, seq_len=st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_pad_predicts_every_token_of_a_document_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], seq_len: int
) -> None:
    expected = []
    for document in documents:
        for start in range(0, len(document) - 1, seq_len):
            window = document[start : start + seq_len + 1]
            predicted = len(window) - 1
            window = window + [_END] * (seq_len + 1 - len(window))
            mask = [1.0] * predicted + [0.0] * (seq_len - predicted)
            expected.append((window[:-1], window[1:], mask))
    folder = prepared_folder(tmp_path_factory.mktemp("data"), documents)
    if not expected:
        with pytest.raises(DataError, match="less than one sample"):
            PackedDataset(folder, "train", seq_len, packing="pad")
        return
    dataset = PackedDataset(folder, "train", seq_len, packing="pad")
    samples = [dataset[i] for i in range(len(dataset))]
    got = [(s.tokens_S.tolist(), s.labels_S.tolist(), s.loss_mask_S.tolist()) for s in samples]
    assert got == expected


def test_no_loss_on_the_first_token_of_the_next_document(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, [[1, 2, _END], [3, _END], [4, 5, _END]])
    sample = PackedDataset(folder, "train", 7, mask_end_of_document=True)[0]
    assert sample.tokens_S.tolist() == [1, 2, _END, 3, _END, 4, 5]
    assert sample.labels_S.tolist() == [2, _END, 3, _END, 4, 5, _END]
    assert sample.loss_mask_S.tolist() == [1, 1, 0, 1, 0, 1, 1]


@given(documents=_documents, seq_len=st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_a_document_mask_says_where_each_token_s_document_starts(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], seq_len: int
) -> None:
    numbers = [n for n, document in enumerate(documents) for _ in document]
    if len(numbers) <= seq_len:
        return
    folder = prepared_folder(tmp_path_factory.mktemp("data"), documents)
    plain = PackedDataset(folder, "train", seq_len)
    masked = PackedDataset(folder, "train", seq_len, document_mask=True)
    both = PackedDataset(folder, "train", seq_len, document_mask=True, mask_end_of_document=True)
    ends = PackedDataset(folder, "train", seq_len, mask_end_of_document=True)
    for i in range(len(plain)):
        window = numbers[i * seq_len : (i + 1) * seq_len + 1]
        sample = masked[i]
        assert sample.document_starts_S is not None
        assert sample.document_starts_S.dtype == np.int32
        assert sample.document_starts_S.tolist() == [window.index(n) for n in window[:-1]]
        inside = [float(a == b) for a, b in pairwise(window)]
        assert sample.loss_mask_S.tolist() == inside
        assert both[i].loss_mask_S.tolist() == inside == ends[i].loss_mask_S.tolist()
        assert sample.tokens_S.tolist() == plain[i].tokens_S.tolist()
        assert sample.labels_S.tolist() == plain[i].labels_S.tolist()
        assert plain[i].document_starts_S is None


def test_both_masks_leave_out_what_either_leaves_out(tmp_path: Path) -> None:
    """Documents that do not end with the closing token, as other programs' files may have."""
    folder = prepared_folder(tmp_path, [[1, 2], [3, _END, 4], [5, 6, 7]])

    def loss(ends: bool, documents: bool) -> list[float]:
        dataset = PackedDataset(folder, "train", 7, "concat", ends, documents)
        mask: list[float] = dataset[0].loss_mask_S.tolist()
        return mask

    assert loss(ends=False, documents=True) == [1, 0, 1, 1, 0, 1, 1]
    assert loss(ends=True, documents=False) == [1, 1, 1, 0, 1, 1, 1]
    assert loss(ends=True, documents=True) == [1, 0, 1, 0, 0, 1, 1]


def test_types_are_those_of_the_batch(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, [[1, 2, 3, _END]])
    for sample in (PackedDataset(folder, "train", 3)[0], SyntheticDataset(9, 3, seed=1)[0]):
        assert sample.tokens_S.dtype == sample.labels_S.dtype == np.int64
        assert sample.loss_mask_S.dtype == np.float32


def test_missing_split_and_mixed_files_are_refused(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, [[1, 2, 3, _END]])
    with pytest.raises(DataError, match="no valid split"):
        PackedDataset(folder, "valid", 2)
    with IndexedWriter(folder / "train", 100) as writer:
        writer.add(np.arange(5), np.array([5]))
    with pytest.raises(DataError, match=r"holds 5 tokens, meta\.json says 4"):
        PackedDataset(folder, "train", 2)


def test_too_short_says_both_lengths(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, [[1, 2, 3, _END]])
    with pytest.raises(DataError, match=r"has 4 tokens .* seq_len 64 \+ 1; lower training.seq_len"):
        PackedDataset(folder, "train", 64)


def test_a_synthetic_sample_needs_no_other() -> None:
    first, second = SyntheticDataset(50, 16, seed=3), SyntheticDataset(50, 16, seed=3)
    expected = [first[i].tokens_S.tolist() for i in range(10)]
    assert [second[i].tokens_S.tolist() for i in reversed(range(10))] == expected[::-1]
    assert len({tuple(tokens) for tokens in expected}) == 10
    assert first[0].tokens_S[1:].tolist() == first[0].labels_S[:-1].tolist()
    assert SyntheticDataset(50, 16, seed=4)[0].tokens_S.tolist() != expected[0]
    tokens = np.concatenate([first[i].tokens_S for i in range(200)])
    assert tokens.min() == 0
    assert tokens.max() == 49


@pytest.mark.parametrize("packing", ["concat", "pad"])
@pytest.mark.parametrize(("vocab_size", "bad"), [(100, 100), (70000, -1)])
def test_a_token_outside_the_vocabulary_is_refused_where_it_is_read(
    tmp_path: Path, packing: Packing, vocab_size: int, bad: int
) -> None:
    folder = prepared_folder(tmp_path, [[1, 2, 3, 4, 5, 6, 7, 8, _END]], vocab_size)
    tokens = np.memmap(folder / "train.bin", token_dtype(vocab_size), "r+")
    tokens[6] = bad
    tokens.flush()
    dataset = PackedDataset(folder, "train", 4, packing)
    assert dataset[0].labels_S.tolist() == [2, 3, 4, 5]
    with pytest.raises(DataError, match=rf"train\.bin is damaged: token 6 has id {bad}, the voc"):
        dataset[1]
