"""The order of training: which sample is number n, as a pure function of n (MegaScale 3.4).

`SampleOrder.sample(n)` is all that a loader asks of the data, whoever loads and in whatever layout:
data position is the one number n, and resuming is continuing to count. `ShuffledSamples` is one
data set, epoch after epoch, each in an order of its own (`shuffle.py`); `Mixture` is several in
stated shares, each through a shuffle of its own, however often it comes round.

How number n finds its data set, without a table of what came before: numbers are cut into blocks of
L. Part k gets of the first m blocks

    first(k, m) = round(C[k + 1] m L) - round(C[k] m L),    C[k] = the shares of the parts before k

samples, and of block m what that grows by. Rounding sums instead of shares makes the parts of a
block add up to L, and a part is within 1 sample of its share behind every block, however many there
are; shares are fractions, so nothing drifts. L is the least power of two from 4,096 on in which the
smallest share is a sample: `first` then never falls (it may otherwise: a share of a tenth of a
sample a block would go 0, 1, 0). Inside a block a permutation of its own says who comes when.

Invariant: n -> (part, index) is a bijection onto what the parts' shuffles give in order, block by
block: a part's samples each come once an epoch. Two epochs of a part can only meet inside a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from megascale.data.prepared import Meta, open_prepared
from megascale.data.samples import Dataset, Sample
from megascale.data.shuffle import permute_one
from megascale.errors import DataError

_LEAST_BLOCK, _MOST_BLOCK = 1 << 12, 1 << 32


class SampleOrder(Protocol):
    """Samples numbered from the start of training, without end; all of `seq_len` positions.

    Two processes that open the same data with the same seed give the same sample for a number.
    """

    seq_len: int
    vocab_size: int

    def sample(self, number: int) -> Sample: ...


class ShuffledSamples:
    """One data set: every epoch visits each sample once."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset = dataset
        self.seq_len, self.vocab_size = dataset.seq_len, dataset.vocab_size
        self._seed = seed

    def sample(self, number: int) -> Sample:
        return self.dataset[self.index(number)]

    def index(self, number: int) -> int:
        """Which sample of the data set is number `number`."""
        epoch, position = divmod(number, len(self.dataset))
        return permute_one(position, len(self.dataset), self._seed, epoch)


class Mixture:
    """Several data sets in shares proportional to `weights` (positive and finite).

    A share is one of samples, which with packing "concat" is one of tokens. The seed of a part
    depends on its place in the list; so do its samples.
    Raises DataError where parts do not fit together or a share is too small to be met.
    """

    def __init__(self, parts: Sequence[Dataset], weights: Sequence[float], seed: int) -> None:
        _check_alike(parts)
        self.seq_len, self.vocab_size = parts[0].seq_len, parts[0].vocab_size
        self.shares = shares_of(weights)
        self.block = _block(min(self.shares))
        self._sums = [Fraction(0), *accumulate(self.shares)]
        keys = np.random.SeedSequence(seed).generate_state(len(parts) + 1, np.uint64)
        self._block_seed = int(keys[0])
        self.parts = [
            ShuffledSamples(part, int(key)) for part, key in zip(parts, keys[1:], strict=True)
        ]

    def sample(self, number: int) -> Sample:
        part, number_in_part = self.place(number)
        return self.parts[part].sample(number_in_part)

    def place(self, number: int) -> tuple[int, int]:
        """Which part sample `number` is of, and its number there, counted from 0 in that part."""
        block, position = divmod(number, self.block)
        rank = permute_one(position, self.block, self._block_seed, block)
        before, behind = self._edges(block), self._edges(block + 1)
        starts = [b - a for a, b in zip(before, behind, strict=True)]  # of the parts in this block
        part = bisect_right(starts, rank) - 1
        return part, before[part + 1] - before[part] + rank - starts[part]

    def counts(self, num_blocks: int) -> list[int]:
        """Samples of each part in the first `num_blocks` blocks."""
        edges = self._edges(num_blocks)
        return [b - a for a, b in pairwise(edges)]

    def _edges(self, num_blocks: int) -> list[int]:
        """Samples of all parts before each, in the first `num_blocks` blocks; whole numbers of any
        size, so exact at any position."""
        total = num_blocks * self.block
        return [
            (2 * total * s.numerator + s.denominator) // (2 * s.denominator) for s in self._sums
        ]


@dataclass(frozen=True)
class Part:
    """A prepared folder of a run."""

    folder: Path
    meta: Meta


def open_parts(folders: Sequence[str], vocab_size: int | None = None) -> list[Part]:
    """Open the prepared folders of a run, one or several; `vocab_size` is the model's if fixed.

    The tokenizer is the first one's; the others' must have its fingerprint and are not loaded.
    Raises DataError where one is missing, damaged, does not fit the model, or has other tokens
    than the first.
    """
    opened = open_prepared(folders[0], vocab_size=vocab_size)
    first = Part(opened.folder, opened.meta)
    others = [Part(Path(folder), Meta.read(Path(folder))) for folder in folders[1:]]
    for part in others:
        _check_same_tokens(part, first)
    return [first, *others]


def _check_same_tokens(part: Part, first: Part) -> None:
    theirs, ours = part.meta.tokenizer_sha256, first.meta.tokenizer_sha256
    if theirs != ours:
        raise DataError(
            f"the parts of data.mixture have different tokenizers: {first.folder} is of "
            f"{ours[:16]}, {part.folder} of {theirs[:16]}; prepare {part.folder} again with: "
            f"megascale data prepare --tokenizer {first.folder} ..., or leave it out"
        )
    for name in ("vocab_size", "end_of_document_id"):
        number, wanted = getattr(part.meta, name), getattr(first.meta, name)
        if number != wanted:
            raise DataError(
                f"meta.json of {first.folder} has {name} {wanted}, that of {part.folder} "
                f"{number}, with the same tokenizer; one of them is damaged: prepare it again"
            )


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """The weights as they are written (0.7 is 7/10), scaled to the sum 1."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


def _block(smallest_share: Fraction) -> int:
    block = _LEAST_BLOCK
    while block * smallest_share < 1:
        block *= 2
    if block > _MOST_BLOCK:
        raise DataError(
            f"the smallest weight of data.mixture is {float(smallest_share):.1e} of all, less than "
            f"a sample in {_MOST_BLOCK:,}; raise it, or leave that data set out"
        )
    return block


def _check_alike(parts: Sequence[Dataset]) -> None:
    assert parts, "a mixture has parts"
    for name in ("seq_len", "vocab_size"):
        values = {getattr(part, name) for part in parts}
        assert len(values) == 1, f"parts of a mixture differ in {name}: {sorted(values)}"
