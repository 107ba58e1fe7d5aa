"""Text to token ids and back: a tokenizer of our own training, or one in Hugging Face's format.

A tokenizer is the text of its `tokenizer.json` and the name of its end-of-document token; its
fingerprint is the SHA-256 of that file. Prepared data and runs store the fingerprint, so that
tokens never meet another tokenizer unnoticed.

Invariant: text encodes to text. `<|endoftext|>` written in a document is encoded as its characters;
only the end of a document makes the special token.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megascale.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
# asked in this order where tokenizer_config.json names no eos_token: GPT, Llama 3, Llama 2, Gemma
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
_GROUP_CHARACTERS = 1 << 17
_SMALLEST_VOCAB = 257  # every byte, and the end of document
_SPEC = "train:BPE:VOCAB, a tokenizer.json, or a folder that holds one"


class TextTokenizer:
    """A tokenizer and its end-of-document token. Picklable: `(tokenizer_json, end_of_document)`."""

    def __init__(
        self, tokenizer_json: bytes, end_of_document: str, parsed: Tokenizer | None = None
    ) -> None:
        """`parsed` is `tokenizer_json` where that was parsed already: it takes a tenth of a second
        for a large vocabulary."""
        self.tokenizer_json = tokenizer_json
        self.end_of_document = end_of_document
        self._tokenizer = parsed or Tokenizer.from_str(tokenizer_json.decode())
        # a stored tokenizer may truncate, pad or obey special tokens found in text; none is ours
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        end = self._tokenizer.token_to_id(end_of_document)
        assert end is not None, f"{end_of_document!r} is not in the vocabulary"
        self.end_of_document_id: int = end

    def __reduce__(self) -> tuple[type[TextTokenizer], tuple[bytes, str]]:
        return TextTokenizer, (self.tokenizer_json, self.end_of_document)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: ids may have gaps."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.tokenizer_json).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without any special token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(tokens of all documents end to end, each closed by the end of document; the number of
        tokens of each)"""
        ids = array("i")  # half the time of an array of numpy a document
        lengths: list[int] = []
        for group in _groups(texts):
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                ids.fromlist(encoding.ids)
                ids.append(self.end_of_document_id)
                lengths.append(len(encoding) + 1)
        return np.frombuffer(ids, np.int32), np.array(lengths, np.int32)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def save(self, folder: Path) -> None:
        """Write tokenizer.json (byte-equal, so the fingerprint holds) and the small
        tokenizer_config.json that makes the folder one of Hugging Face's."""
        (folder / "tokenizer.json").write_bytes(self.tokenizer_json)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end_of_document}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """`texts` in groups: the library's results take up to 300 bytes a token until they are read."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def training_vocab_size(spec: str) -> int | None:
    """VOCAB of a `train:BPE:VOCAB` specification; None where `spec` is a path."""
    if not spec.startswith("train:"):
        return None
    _, _, rest = spec.partition(":")
    algorithm, _, size = rest.partition(":")
    if algorithm.upper() != "BPE" or not size.isdecimal():
        raise DataError(f"tokenizer {spec!r} is not legal; give {_SPEC}, like train:BPE:4096")
    if int(size) < _SMALLEST_VOCAB:
        raise DataError(
            f"tokenizer {spec!r} has a vocabulary of {size}; byte-level BPE needs at least "
            f"{_SMALLEST_VOCAB} (256 bytes and {END_OF_DOCUMENT})"
        )
    return int(size)


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE on `texts`. Little text may hold fewer pairs than `vocab_size` asks for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer.to_str(pretty=True).encode(), END_OF_DOCUMENT)


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a tokenizer.json, or of a folder (Hugging Face's or prepared) with one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no tokenizer at {file}; give {_SPEC}")
    try:
        tokenizer_json = file.read_bytes()
        tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # noqa: BLE001 - the library raises no narrower class
        raise DataError(f"{file} is not a tokenizer: {error}; give {_SPEC}") from None
    config = file.parent / "tokenizer_config.json"
    ends = _configured_end(config) or _KNOWN_ENDS
    end = next((name for name in ends if tokenizer.token_to_id(name) is not None), None)
    if end is None:
        raise DataError(
            f"{file} has no end-of-document token, looked for {', '.join(ends)}; "
            f"name one of its tokens as eos_token in {config}"
        )
    return TextTokenizer(tokenizer_json, end, tokenizer)


def _configured_end(config: Path) -> list[str]:
    """eos_token of a tokenizer_config.json, which is a string or an object with its content."""
    if not config.is_file():
        return []
    try:
        end = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{config} does not parse: {error}; repair or remove it") from None
    end = end.get("content") if isinstance(end, dict) else end
    return [end] if isinstance(end, str) else []
