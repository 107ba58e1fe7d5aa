"""Which rank reads which block, who is sent which bytes of it, and in which round. Pure.

A *block* is the unit that one hash vouches for (16 MiB of a file's values). It is read whole, once,
by the rank that needs most of it; of several that need as much, by the one that reads least so far.
What else is needed of it goes to the others in messages, one a block and receiver.

*Rounds* bound memory and order the messages. In a round a rank reads at most `round_bytes` and is
sent at most as much; its blocks are in the order of the rounds. Every rank computes the rounds of
all from the same input, so both ends of a message know it. Blocks that nobody else needs have no
round: they are read when the messages are through.

Each rank keeps only its own part (`RankPlan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch

from megascale.checkpoint.layout import Entry
from megascale.checkpoint.reading.saved import Saved, Want
from megascale.shards import Box, range_boxes
from megascale.storage import BLOCK_BYTES

BlockId = tuple[int, int]
"""Number of a file, number of a block in it."""


@dataclass(frozen=True)
class Limits:
    """block_bytes of one hash; round_bytes at most read, and at most received, in a round."""

    block_bytes: int = BLOCK_BYTES
    round_bytes: int = 4 * BLOCK_BYTES

    def __post_init__(self) -> None:
        assert self.round_bytes >= self.block_bytes, self


@dataclass(frozen=True)
class Part:
    """Values of a block for a piece.

    start, shape, dtype  a saved rectangle, row-major from this byte of the block on
    source               what of it is wanted, inside of it
    piece, target        number of the piece at its rank, and the place inside of it
    """

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Box
    piece: int
    target: Box

    @property
    def num_bytes(self) -> int:
        return prod(self.source.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Read:
    """A block that this rank reads, what it keeps of it, and what it sends to whom."""

    block: BlockId
    own: tuple[Part, ...]
    sends: tuple[tuple[int, tuple[Part, ...]], ...]


@dataclass(frozen=True)
class Receive:
    reader: int
    block: BlockId
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Round:
    reads: tuple[Read, ...]
    receives: tuple[Receive, ...]


@dataclass(frozen=True)
class RankPlan:
    """What one rank does: the rounds that it takes part in, then the blocks for itself alone."""

    rounds: tuple[Round, ...]
    alone: tuple[Read, ...]

    def reads(self) -> Iterator[Read]:
        """In order."""
        for turn in self.rounds:
            yield from turn.reads
        yield from self.alone

    def saved_dtypes(self) -> dict[int, torch.dtype]:
        """Of each of this rank's pieces."""
        own = (part for read in self.reads() for part in read.own)
        sent = (part for turn in self.rounds for r in turn.receives for part in r.parts)
        return {part.piece: part.dtype for part in chain(own, sent)}


class Needs:
    """Who needs what of which block."""

    def __init__(self, saved: Saved, limits: Limits) -> None:
        self._saved = saved
        self.limits = limits
        # block -> rank -> bytes; and what they are of: (piece, want, entry)
        self.num_bytes: dict[BlockId, dict[int, int]] = {}
        self._touches: dict[tuple[BlockId, int], list[tuple[int, Want, Entry]]] = {}

    def add(self, rank: int, piece: int, want: Want) -> None:
        for file, entry, common in self._saved.overlapping(want):
            first, last = _span(entry, common, self.limits.block_bytes)
            for index in range(first, last + 1):
                num_bytes = self._num_bytes(entry, common, index, alone=first == last)
                if num_bytes:
                    of_block = self.num_bytes.setdefault((file, index), {})
                    of_block[rank] = of_block.get(rank, 0) + num_bytes
                    self._touches.setdefault(((file, index), rank), []).append((piece, want, entry))

    def parts(self, block: BlockId, rank: int) -> tuple[Part, ...]:
        """In the order of their values in the block; the same at reader and receiver."""
        begin = block[1] * self.limits.block_bytes
        parts = [
            Part(
                entry.start + first * entry.dtype.itemsize - begin,
                saved.shape,
                entry.dtype,
                _inside(common, saved),
                piece,
                _inside(common, want.box),
            )
            for piece, want, entry in self._touches.get((block, rank), ())
            for first, saved in _cut(entry, block[1], self.limits.block_bytes)
            if (common := saved.intersect(want.box)) is not None
        ]
        return tuple(sorted(parts, key=lambda part: (part.start, part.source.offset, part.piece)))

    def _num_bytes(self, entry: Entry, common: Box, index: int, *, alone: bool) -> int:
        """Of `common`, in block `index`. `alone`: all of it is there."""
        itemsize, block_bytes = entry.dtype.itemsize, self.limits.block_bytes
        if alone:
            return common.num_elements * itemsize
        if common == entry.box:
            begin, end = index * block_bytes, (index + 1) * block_bytes
            return min(entry.stop, end) - max(entry.start, begin)
        parts = (saved.intersect(common) for _, saved in _cut(entry, index, block_bytes))
        return sum(part.num_elements for part in parts if part is not None) * itemsize


def choose_readers(needs: Needs) -> dict[BlockId, int]:
    """The rank that needs most of a block; where several do, the one that has least to read.

    Blocks with one such rank are given out first, so that the others can even out the load.
    """
    readers: dict[BlockId, int] = {}
    num_blocks: dict[int, int] = {}
    tied: list[tuple[BlockId, list[int]]] = []
    for block in sorted(needs.num_bytes):
        of_block = needs.num_bytes[block]
        most = max(of_block.values())
        candidates = sorted(rank for rank, num in of_block.items() if num == most)
        if len(candidates) > 1:
            tied.append((block, candidates))
            continue
        readers[block] = candidates[0]
        num_blocks[candidates[0]] = num_blocks.get(candidates[0], 0) + 1
    for block, candidates in tied:
        reader = min(candidates, key=lambda rank: (num_blocks.get(rank, 0), rank))
        readers[block] = reader
        num_blocks[reader] = num_blocks.get(reader, 0) + 1
    return readers


def plan_rank(needs: Needs, readers: Mapping[BlockId, int], rank: int) -> RankPlan:
    """The part of `rank`, once it is said who reads each block.

    `needs` must have the needs of all ranks but a block's reader; of its reader's own, each rank
    must have its own alone. So the rounds come out alike on all.
    """
    rounds: dict[int, tuple[list[Read], list[Receive]]] = {}
    for block, number in assign_rounds(needs, readers).items():
        reader, mine = readers[block], rounds.setdefault(number, ([], []))
        if reader == rank:
            mine[0].append(_read(needs, block, rank))
        elif rank in needs.num_bytes[block]:
            mine[1].append(Receive(reader, block, needs.parts(block, rank)))
    alone = [
        _read(needs, block, rank)
        for block in sorted(needs.num_bytes)
        if readers[block] == rank and set(needs.num_bytes[block]) == {rank}
    ]
    taken = [
        Round(tuple(reads), tuple(receives))
        for _, (reads, receives) in sorted(rounds.items())
        if reads or receives
    ]
    return RankPlan(tuple(taken), tuple(alone))


def assign_rounds(needs: Needs, readers: Mapping[BlockId, int]) -> dict[BlockId, int]:
    """Each block that somebody besides its reader needs goes to the first round, not before the
    one of its reader's last block, in which reader and receivers have room for it."""
    limit, block_bytes = needs.limits.round_bytes, needs.limits.block_bytes
    read_bytes: dict[tuple[int, int], int] = {}  # (round, rank)
    sent_bytes: dict[tuple[int, int], int] = {}
    last: dict[int, int] = {}
    rounds: dict[BlockId, int] = {}
    for block in _in_turns(needs, readers):
        reader = readers[block]
        receivers = {q: num for q, num in needs.num_bytes[block].items() if q != reader}
        number = last.get(reader, 0)
        while read_bytes.get((number, reader), 0) + block_bytes > limit or any(
            sent_bytes.get((number, q), 0) + num > limit for q, num in receivers.items()
        ):
            number += 1
        last[reader] = rounds[block] = number
        read_bytes[number, reader] = read_bytes.get((number, reader), 0) + block_bytes
        for q, num in receivers.items():
            sent_bytes[number, q] = sent_bytes.get((number, q), 0) + num
    return rounds


def _in_turns(needs: Needs, readers: Mapping[BlockId, int]) -> Sequence[BlockId]:
    """The blocks to be sent: each reader's first, then each one's second, and so on."""
    seen: dict[int, int] = {}
    turns: list[tuple[int, BlockId]] = []
    for block in sorted(needs.num_bytes):
        reader = readers[block]
        if set(needs.num_bytes[block]) != {reader}:
            turn = seen[reader] = seen.get(reader, -1) + 1
            turns.append((turn, block))
    return [block for _, block in sorted(turns)]


def _read(needs: Needs, block: BlockId, rank: int) -> Read:
    others = sorted(q for q in needs.num_bytes[block] if q != rank)
    sends = tuple((q, needs.parts(block, q)) for q in others)
    return Read(block, needs.parts(block, rank), sends)


def _span(entry: Entry, common: Box, block_bytes: int) -> tuple[int, int]:
    """First and last block in which the entry has values of `common`."""
    first = last = 0
    for axis, width in enumerate(entry.box.shape):
        start = common.offset[axis] - entry.box.offset[axis]
        first = first * width + start
        last = last * width + start + common.shape[axis] - 1
    itemsize = entry.dtype.itemsize
    return (
        (entry.start + first * itemsize) // block_bytes,
        (entry.start + last * itemsize) // block_bytes,
    )


def _cut(entry: Entry, index: int, block_bytes: int) -> list[tuple[int, Box]]:
    """(first element inside the entry, rectangle) of what block `index` holds of the entry."""
    start = max(entry.start, index * block_bytes) - entry.start
    stop = min(entry.stop, (index + 1) * block_bytes) - entry.start
    if (start, stop) == (0, entry.num_bytes):
        return [(0, entry.box)]
    itemsize = entry.dtype.itemsize
    return range_boxes(entry.box, start // itemsize, stop // itemsize)


def _inside(box: Box, outer: Box) -> Box:
    offset = tuple(a - b for a, b in zip(box.offset, outer.offset, strict=True))
    return Box(offset, box.shape)
