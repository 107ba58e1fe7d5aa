"""Samples of `seq_len` tokens, cut from token files or drawn at random: S positions each.

concat   all tokens in stored order, cut into windows of S + 1 that overlap by one, so that every
         token but the first is predicted once; a sample may hold several documents
pad      each document by itself in windows of at most S + 1; the rest of the last is padding,
         which the loss mask leaves out

With a document mask a sample of "concat" says where the document of each token starts, so that
attention stays inside it. What nothing of a document predicts, its first token, then has no loss:
that is `mask_end_of_document`, by the index's documents instead of by the token that ends them. The
two leave out the same positions where every document ends with that token and holds it nowhere
else; with both, what either leaves out is left out.

Invariant: sample i is a pure function of the files and i. Nothing here knows of shuffling, ranks or
batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megascale.data.indexed import IndexedTokens
from megascale.data.prepared import Meta, Split
from megascale.errors import DataError

Packing = Literal["concat", "pad"]


@dataclass(frozen=True)
class Sample:
    """`labels_S[s]` is the token after `tokens_S[s]`; the loss counts where the mask is 1.

    document_starts_S  position in the sample where the document of each token starts; None where
                       tokens attend to all before them
    """

    tokens_S: NDArray[np.int64]
    labels_S: NDArray[np.int64]
    loss_mask_S: NDArray[np.float32]
    document_starts_S: NDArray[np.int32] | None = None


class Dataset(Protocol):
    """A finite collection of samples. `len()` of them, all of `seq_len` positions."""

    seq_len: int
    vocab_size: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class PackedDataset:
    """One split of a prepared folder."""

    def __init__(
        self,
        folder: str | Path,
        split: Split,
        seq_len: int,
        packing: Packing = "concat",
        mask_end_of_document: bool = False,
        document_mask: bool = False,
    ) -> None:
        """Raises DataError where the split is missing, damaged, or shorter than one sample."""
        assert packing == "concat" or not document_mask, "a padded sample is one document"
        meta = Meta.read(Path(folder))
        if split not in meta.splits:
            raise DataError(
                f"{folder} has no {split} split; prepare the data with a validation fraction"
            )
        self.seq_len = seq_len
        self.vocab_size = meta.vocab_size
        self._end_of_document = meta.end_of_document_id
        self._mask_end_of_document = mask_end_of_document
        self._file = IndexedTokens(Path(folder) / split)
        if self._file.num_tokens != meta.splits[split].tokens:
            raise DataError(
                f"{self._file.prefix}.bin holds {self._file.num_tokens} tokens, meta.json says "
                f"{meta.splits[split].tokens}; the files are of different preparations"
            )
        # runs of tokens that windows do not cross; of one token, nothing is predicted
        self._documents = self._file.document_offsets() if document_mask else None
        if packing == "pad":
            self._starts = self._file.document_offsets()
            windows = -(-(np.diff(self._starts) - 1) // seq_len)
        else:  # a shorter last window is dropped
            self._starts = np.array([0, self._file.num_tokens], np.int64)
            windows = (np.diff(self._starts) - 1) // seq_len
        self._first_samples = np.concatenate([[0], np.cumsum(np.maximum(windows, 0))])
        if len(self) == 0:
            raise DataError(
                f"{self._file.prefix} has {self._file.num_tokens} tokens in "
                f"{self._file.num_documents} documents, less than one sample of seq_len "
                f"{seq_len} + 1; lower training.seq_len or prepare more text"
            )

    def __len__(self) -> int:
        return int(self._first_samples[-1])

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < len(self), (index, len(self))
        run = int(np.searchsorted(self._first_samples, index, side="right")) - 1
        start = int(self._starts[run]) + (index - int(self._first_samples[run])) * self.seq_len
        stop = min(start + self.seq_len + 1, int(self._starts[run + 1]))
        window = np.full(self.seq_len + 1, self._end_of_document, np.int64)
        window[: stop - start] = self._read(start, stop)
        loss_mask_S = np.zeros(self.seq_len, np.float32)
        loss_mask_S[: stop - start - 1] = 1.0
        if self._mask_end_of_document:
            loss_mask_S[window[:-1] == self._end_of_document] = 0.0
        if self._documents is None:
            return Sample(window[:-1], window[1:], loss_mask_S)
        begins = _begins(self._documents, start, stop)
        loss_mask_S[begins - 1] = 0.0
        starts_W = np.zeros(self.seq_len + 1, np.int32)
        starts_W[begins] = begins
        return Sample(window[:-1], window[1:], loss_mask_S, np.maximum.accumulate(starts_W[:-1]))

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens of the file, checked here: checking all on opening would read all of it."""
        tokens = self._file.read(start, stop)
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            at = int(np.argmax((tokens >= self.vocab_size) | (tokens < 0)))
            raise DataError(
                f"{self._file.prefix}.bin is damaged: token {start + at} has id {tokens[at]}, the "
                f"vocabulary has {self.vocab_size} entries; copy or prepare it again"
            )
        return tokens


def _begins(offsets: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """Where documents begin inside tokens start to stop, but for one that begins at `start`;
    counted from `start`. A document without tokens begins where the next one does."""
    first = np.searchsorted(offsets, start, side="right")
    behind = np.searchsorted(offsets, stop, side="left")
    return offsets[first:behind] - start


class SyntheticDataset:
    """Seeded random tokens, for benchmarks and tests; sample i needs no file and no neighbour."""

    def __init__(
        self, vocab_size: int, seq_len: int, seed: int, num_samples: int = 1 << 40
    ) -> None:
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self._seed = seed
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < len(self), (index, len(self))
        generator = np.random.Generator(np.random.Philox(key=[self._seed, index]))
        window = generator.integers(0, self.vocab_size, self.seq_len + 1)
        return Sample(window[:-1], window[1:], np.ones(self.seq_len, np.float32))
