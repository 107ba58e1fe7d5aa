"""The writing half of a preparation: token files of each split, and the counts over them.

The unigram entropy is the loss of the best model that ignores context, so a trained model is worth
something only below it; it is counted here because every token passes through.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megascale.data.encode import Encoded, SplitRule
from megascale.data.indexed import IndexedWriter
from megascale.data.inputs.documents import Kind
from megascale.data.prepared import SPLITS, Split, SplitMeta
from megascale.errors import DataError

logger = logging.getLogger(__name__)


class CorpusWriter:
    """Appends encoded tasks to `folder`; a split without documents leaves no files.

    counts      occurrences of each token id, int64 [V], per split
    splits      tokens and documents written, per split that has any
    skipped     documents and parts of files left out, by why
    ends_added  ends of documents put behind documents that were tokens already
    smallest_draw   of all documents: the first to be held out, were the fraction larger
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.counts = {split: np.zeros(vocab_size, np.int64) for split in SPLITS}
        self.splits: dict[str, SplitMeta] = {}
        self.skipped = dict.fromkeys(Kind, 0)
        self.ends_added = 0
        self._folder = folder
        self._vocab_size = vocab_size
        self._writers: dict[Split, IndexedWriter] = {}
        self._open_files = ExitStack()
        self._digest = hashlib.sha256()
        self.smallest_draw = 1.0

    def add(self, encoded: Encoded) -> None:
        for split in SPLITS:
            tokens, lengths = encoded.tokens[split], encoded.lengths[split]
            if not len(lengths):
                continue
            self._writer(split).add(tokens, lengths)
            self.counts[split] += np.bincount(tokens, minlength=self._vocab_size)
            before = self.splits.get(split, SplitMeta(0, 0))
            self.splits[split] = SplitMeta(
                before.tokens + len(tokens), before.documents + len(lengths)
            )
        for kind, number in encoded.skipped.items():
            self.skipped[kind] += number
        for where in encoded.broken:
            logger.warning("skipped, and counted in meta.json: %s", where)
        self.ends_added += encoded.ends_added
        self._digest.update(encoded.digests)
        self.smallest_draw = min(self.smallest_draw, encoded.smallest_draw)

    @property
    def num_tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents_sha256(self) -> str:
        return self._digest.hexdigest()

    @property
    def num_documents(self) -> int:
        return sum(split.documents for split in self.splits.values())

    def require_splits(self, rule: SplitRule) -> None:
        """Raise DataError where a split that was asked for received no document."""
        if self.num_documents == 0:
            raise DataError(
                f"the input holds no text ({self.skipped[Kind.UNDECODABLE]} documents are not "
                f"UTF-8, {self.skipped[Kind.EMPTY]} are empty, {self.skipped[Kind.NULL]} null, "
                f"{self.skipped[Kind.ROW_GROUP]} row groups and the ends of "
                f"{self.skipped[Kind.FILE_END]} files broken); name other files"
            )
        if rule.validation_fraction > 0 and len(self.splits) < 2:
            raise DataError(
                f"the validation fraction {rule.validation_fraction} leaves one of the two splits "
                f"empty with {self.num_documents} documents; give more documents (one a file, or "
                "one a line of a .jsonl), or set the validation fraction to 0"
            )

    def _writer(self, split: Split) -> IndexedWriter:
        if split not in self._writers:
            writer = IndexedWriter(self._folder / split, self._vocab_size)
            self._writers[split] = self._open_files.enter_context(writer)
        return self._writers[split]

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open_files.__exit__(kind, error, trace)


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Entropy of the frequencies `counts` [V], in nats a token."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def cross_entropy_nats(counts: NDArray[np.int64], model_counts: NDArray[np.int64]) -> float | None:
    """Mean loss, in nats, on tokens with `counts` [V] of the unigram model of `model_counts` [V].

    One is added to each of the model's counts, for tokens that it never saw. None without tokens.
    """
    total = int(counts.sum())
    if total == 0:
        return None
    log_q = np.log(model_counts + 1.0) - np.log(model_counts.sum() + len(model_counts))
    return float(-(counts * log_q).sum() / total)
