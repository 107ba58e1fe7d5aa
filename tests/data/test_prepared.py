"""A folder that does not fit is refused with both sides of the mismatch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.data.prepare import prepare
from megascale.data.prepared import open_prepared
from megascale.data.tokenizer import train_bpe
from megascale.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "a.txt"
    source.write_text("some words, some more words\n" * 10)
    prepare([str(source)], "train:BPE:280", tmp_path / "data", workers=1, validation_fraction=0.0)
    return tmp_path / "data"


def test_opens_what_was_prepared(folder: Path) -> None:
    data = open_prepared(folder, vocab_size=280)
    assert data.meta.vocab_size == data.tokenizer.vocab_size <= 280
    assert data.tokenizer.fingerprint == data.meta.tokenizer_sha256
    open_prepared(str(folder), tokenizer_sha256=data.meta.tokenizer_sha256)


def test_missing_folder_says_how_to_make_it(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(DataError, match=f"megascale data prepare .* --output {absent}"):
        open_prepared(absent)
    with pytest.raises(DataError, match=r"data\.path is not set"):
        open_prepared("")


def test_smaller_vocabulary_is_refused(folder: Path) -> None:
    vocab_size = open_prepared(folder).meta.vocab_size
    match = f"model.vocab_size is 100, the tokenizer of .* has {vocab_size} entries"
    with pytest.raises(DataError, match=match):
        open_prepared(folder, vocab_size=100)


def test_other_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="the model with 0123456789abcdef; prepare"):
        open_prepared(folder, tokenizer_sha256="0123456789abcdef" * 4)
    other = train_bpe(["other text"], 300)
    other.save(folder)
    with pytest.raises(DataError, match=f"has fingerprint {other.fingerprint[:16]}"):
        open_prepared(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 1, "splits": {}}'])
def test_damaged_meta_is_refused(folder: Path, text: str) -> None:
    (folder / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"meta\.json is damaged"):
        open_prepared(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", "280"), ("seed", None), ("end_of_document_id", -1), ("source_files", True)],
)
def test_numbers_of_meta_are_numbers(folder: Path, name: str, value: object) -> None:
    values = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(values | {name: value}))
    with pytest.raises(
        DataError, match=rf"meta\.json is damaged \({name} is {value!r}, not a numb"
    ):
        open_prepared(folder)
    splits = {"train": {"tokens": value, "documents": 1}}
    (folder / "meta.json").write_text(json.dumps(values | {"splits": splits}))
    with pytest.raises(DataError, match=rf"damaged \(tokens is {value!r}"):
        open_prepared(folder)


def test_another_end_or_vocabulary_than_that_of_the_tokens_is_refused(folder: Path) -> None:
    meta = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(json.dumps(json.loads(meta) | {"vocab_size": 5}))
    with pytest.raises(DataError, match=r"give vocab_size \d+, its tokens were made with 5 "):
        open_prepared(folder)
    (folder / "meta.json").write_text(meta)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(DataError, match=r"give end_of_document_id \d+, .*made with 0 "):
        open_prepared(folder)


def test_other_format_names_the_command(folder: Path) -> None:
    values = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**values, "format_version": 9}))
    with pytest.raises(
        DataError, match=r"format version 9; this program reads 1 to 2: .* data prepare"
    ):
        open_prepared(folder)
