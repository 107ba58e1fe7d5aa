"""Text survives tokenising, whatever it holds, and tokenizers of both kinds load."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from megascale.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    train_bpe,
    training_vocab_size,
)
from megascale.errors import DataError

_TEXTS = ["def f(x):\n    return x + 1\n", "the quick brown fox, the slow brown fox\n"] * 20


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_bpe(_TEXTS, 280)


@given(text=st.text())
def test_round_trip(tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_documents_end_with_the_special_token(tokenizer: TextTokenizer) -> None:
    tokens, lengths = tokenizer.encode_documents(["the fox", "x"])
    end = tokenizer.end_of_document_id
    first, second = [*tokenizer.encode("the fox"), end], [*tokenizer.encode("x"), end]
    assert tokens.tolist() == first + second
    assert lengths.tolist() == [len(first), len(second)]
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|endoftext|>"


def test_text_cannot_spell_the_special_token(tokenizer: TextTokenizer) -> None:
    text = "before<|endoftext|>after"
    assert tokenizer.end_of_document_id not in tokenizer.encode(text)
    document, _ = tokenizer.encode_documents([text])
    assert document.tolist().count(tokenizer.end_of_document_id) == 1
    assert tokenizer.decode(document[:-1].tolist()) == text


def test_training_is_deterministic_and_as_large_as_asked(tokenizer: TextTokenizer) -> None:
    assert train_bpe(_TEXTS, 280).fingerprint == tokenizer.fingerprint
    assert tokenizer.vocab_size == 280


def test_little_text_makes_a_smaller_vocabulary() -> None:
    assert train_bpe(["ab"], 4096).vocab_size == 258  # bytes, end of document, "ab"


def test_saved_folder_is_equal_and_loads_in_transformers(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == tokenizer.fingerprint
    for path in (tmp_path, file):
        loaded = load_tokenizer(path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.end_of_document_id == tokenizer.end_of_document_id
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode("the brown fox") == tokenizer.encode("the brown fox")
    assert theirs.eos_token_id == tokenizer.end_of_document_id


def test_pickles_to_the_same_tokenizer(tokenizer: TextTokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode("the fox") == tokenizer.encode("the fox")


def _foreign(folder: Path, special: list[str]) -> Tokenizer:
    """A tokenizer as others ship it: begins every text with a token, truncates and pads."""
    foreign = Tokenizer(models.BPE())
    foreign.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    foreign.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(vocab_size=290, special_tokens=special, initial_alphabet=alphabet),
    )
    foreign.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
    )
    foreign.enable_truncation(4)
    foreign.enable_padding(length=4)
    foreign.save(str(folder / "tokenizer.json"))
    return foreign


@pytest.mark.parametrize("named", ["</doc>", {"content": "</doc>", "lstrip": False}])
def test_foreign_folder_names_its_own_end(tmp_path: Path, named: object) -> None:
    foreign = _foreign(tmp_path, ["<s>", "</s>", "</doc>"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.end_of_document_id == foreign.token_to_id("</doc>")
    document, _ = loaded.encode_documents(["the quick brown fox, the slow brown fox"])
    assert len(document) > 5  # neither truncated nor padded
    assert foreign.token_to_id("<s>") not in document


def test_foreign_file_has_a_well_known_end(tmp_path: Path) -> None:
    foreign = _foreign(tmp_path, ["<s>", "</s>"])
    assert load_tokenizer(tmp_path).end_of_document_id == foreign.token_to_id("</s>")


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    _foreign(tmp_path, ["<s>"])
    with pytest.raises(DataError, match=r"no end-of-document token.*eos_token"):
        load_tokenizer(tmp_path)


def test_an_end_that_is_named_but_not_there_is_refused(tmp_path: Path) -> None:
    _foreign(tmp_path, ["<s>", "</s>"])
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "</doc>"}))
    with pytest.raises(DataError, match=r"looked for </doc>; name one of its tokens as eos_token"):
        load_tokenizer(tmp_path)
    config.write_bytes(b"\xff{}")
    with pytest.raises(DataError, match=r"tokenizer_config\.json does not parse"):
        load_tokenizer(tmp_path)


def test_missing_and_malformed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer at .*tokenizer\.json; give train:BPE"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train:BPE", "not legal"),
        ("train:BPE:many", "not legal"),
        ("train:unigram:4096", "not legal"),
        ("train:BPE:256", "at least 257"),
    ],
)
def test_bad_specifications(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        training_vocab_size(spec)


def test_good_specifications() -> None:
    assert training_vocab_size("train:BPE:4096") == 4096
    assert training_vocab_size("some/folder") is None


def test_groups_change_no_token(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"def f_{i}(x):\n    return {'x + ' * i}1\n" for i in range(50)]
    tokens, lengths = tokenizer.encode_documents(texts)
    assert tokens.tolist() == [
        token for text in texts for token in (*tokenizer.encode(text), tokenizer.end_of_document_id)
    ]
    monkeypatch.setattr("megascale.data.tokenizer._GROUP_CHARACTERS", 60)
    again, lengths_again = tokenizer.encode_documents(texts)
    assert again.tolist() == tokens.tolist()
    assert lengths_again.tolist() == lengths.tolist()
    assert [len(array) for array in tokenizer.encode_documents([])] == [0, 0]
