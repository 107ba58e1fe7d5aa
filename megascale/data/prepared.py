"""A prepared folder: what `megascale data prepare` leaves, and the checks before anyone reads it.

    train.bin train.idx     tokens of the training documents, each closed by the end of document
    valid.bin valid.idx     of the held-out documents (absent where nothing was held out)
    tokenizer.json          with tokenizer_config.json: loads as a Hugging Face tokenizer
    meta.json               `Meta`

Invariant: a folder that opens has the tokenizer that made its tokens, and no token id that the
model has no row for.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megascale.data.tokenizer import TextTokenizer, load_tokenizer
from megascale.errors import DataError

FORMAT_VERSION = 2  # 2 counts more kinds of what was skipped; the rest is as in 1
_READABLE = (1, 2)
Split = Literal["train", "valid"]
SPLITS: tuple[Split, ...] = ("train", "valid")


@dataclass(frozen=True)
class SplitMeta:
    """Size of one split. Tokens include the end of each document."""

    tokens: int
    documents: int


@dataclass(frozen=True)
class Meta:
    """What is in a prepared folder and where it came from.

    unigram_entropy_nats               entropy of the training tokens' frequencies: the loss of the
                                       best model that ignores context
    valid_unigram_cross_entropy_nats   loss of that model on the held-out split (frequencies with
                                       one added to each count); null without held-out documents
    skipped_*                          documents that are not UTF-8, empty or null; broken row
                                       groups of Parquet files; files whose end could not be read
    documents_sha256                   over the digests of all documents in stored order: equal
                                       digests mean equal text, wherever the files lay
    ends_added                         documents given as tokens without the end of document
    """

    format_version: int
    tokenizer_sha256: str
    vocab_size: int
    end_of_document_id: int
    splits: dict[str, SplitMeta]
    unigram_entropy_nats: float
    valid_unigram_cross_entropy_nats: float | None
    skipped_undecodable: int
    skipped_empty: int
    source_files: int
    documents_sha256: str
    seed: int
    validation_fraction: float
    command: str
    skipped_null: int = 0
    skipped_row_groups: int = 0
    skipped_file_ends: int = 0
    ends_added: int = 0

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2)
        (folder / "meta.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Meta:
        path = folder / "meta.json"
        if not path.is_file():
            raise DataError(
                f"no prepared data in {folder} (no meta.json); make it with: megascale data "
                f"prepare --input stdlib --tokenizer train:BPE:4096 --output {folder}"
            )
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = values["format_version"]
            if version not in _READABLE:
                raise DataError(
                    f"{path} has format version {version}; this program reads {_READABLE[0]} to "
                    f"{FORMAT_VERSION}: prepare the data again with: {values.get('command')}"
                )
            splits = {name: SplitMeta(**split) for name, split in values.pop("splits").items()}
            meta = cls(splits=splits, **values)
            parts: list[Meta | SplitMeta] = [meta, *splits.values()]
            for part in parts:
                _require_numbers(part)
            return meta
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is damaged ({error}); prepare the data again") from None


def _require_numbers(part: Meta | SplitMeta) -> None:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.type == "int" and (type(value) is not int or value < 0):
            raise ValueError(f"{field.name} is {value!r}, not a number of things")


@dataclass(frozen=True)
class PreparedData:
    """An opened and checked folder."""

    folder: Path
    meta: Meta
    tokenizer: TextTokenizer


def open_prepared(
    folder: str | Path, *, vocab_size: int | None = None, tokenizer_sha256: str | None = None
) -> PreparedData:
    """Open a prepared folder.

    vocab_size         the model's, where it is fixed; it may be larger than the tokenizer's
    tokenizer_sha256   fingerprint that a run or checkpoint was trained with, where there is one
    Raises DataError where the folder is missing, damaged, or does not fit.
    """
    if str(folder) == "":
        raise DataError("data.path is not set; name a folder made by `megascale data prepare`")
    folder = Path(folder)
    meta = Meta.read(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != meta.tokenizer_sha256:
        raise DataError(
            f"the tokenizer of {folder} has fingerprint {tokenizer.fingerprint[:16]}, its tokens "
            f"were made with {meta.tokenizer_sha256[:16]}; put that tokenizer.json back, or "
            "prepare the data again"
        )
    for name in ("vocab_size", "end_of_document_id"):
        number, stored = getattr(tokenizer, name), getattr(meta, name)
        if number != stored:
            raise DataError(
                f"{folder}: the tokenizer's files give {name} {number}, its tokens were made with "
                f"{stored} (meta.json); put back the file that was changed (tokenizer_config.json "
                "names the end of document), or prepare the data again"
            )
    if tokenizer_sha256 is not None and tokenizer_sha256 != meta.tokenizer_sha256:
        raise DataError(
            f"the data of {folder} was tokenised with fingerprint {meta.tokenizer_sha256[:16]}, "
            f"the model with {tokenizer_sha256[:16]}; prepare the data with the model's tokenizer"
        )
    if vocab_size is not None and vocab_size < meta.vocab_size:
        raise DataError(
            f"model.vocab_size is {vocab_size}, the tokenizer of {folder} has {meta.vocab_size} "
            f"entries; set model.vocab_size to at least {meta.vocab_size}, or leave it out"
        )
    return PreparedData(folder, meta, tokenizer)
