"""How a ring of global batches lies in memory, as arithmetic (MegaScale 3.4).

    page      4,096 bytes of counters (`ring.py`) and 4,096 bytes for the loader's last words
    slot i    64 bytes a header, 8 bytes a share of checksums, then the shares

A share is what one data rank needs of a global batch, in the order of execution; ranks that differ
in tensor or pipeline coordinates alone read the same bytes. R rows of S positions, W = S + 1:

    windows     int32 [R, W]
    mask        bits  [R, ceil(S / 8)], 1 where the loss counts
    documents   int32 [R, S], only where tokens attend to their own document
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

PAGE_BYTES = 4096
LINE_BYTES = 64
WORDS_AT = PAGE_BYTES  # the loader's last words
FIRST_READER = 16  # word of the page; those before are the loader's
MOST_READERS = PAGE_BYTES // 8 - FIRST_READER - 64  # 64 words for the stamps of slots
MOST_SLOTS = 64
FIRST_STAMP = FIRST_READER + MOST_READERS


def _up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class RingShape:
    """What the loader and the ranks of a node agree on.

    dp_ranks   data ranks that live on this node, a share each, ascending
    num_rows   samples of a data rank in the largest global batch
    """

    num_slots: int
    num_readers: int
    dp_ranks: tuple[int, ...]
    dp_size: int
    micro_batch_size: int
    num_rows: int
    seq_len: int
    has_documents: bool

    def __post_init__(self) -> None:
        assert 1 <= self.num_slots <= MOST_SLOTS, self.num_slots
        assert 1 <= self.num_readers <= MOST_READERS, self.num_readers
        assert list(self.dp_ranks) == sorted(set(self.dp_ranks)), self.dp_ranks

    @property
    def mask_bytes(self) -> int:
        return -(-self.seq_len // 8)

    @property
    def mask_at(self) -> int:
        return _up(4 * self.num_rows * (self.seq_len + 1), LINE_BYTES)

    @property
    def documents_at(self) -> int:
        return self.mask_at + _up(self.num_rows * self.mask_bytes, LINE_BYTES)

    @property
    def share_bytes(self) -> int:
        documents = 4 * self.num_rows * self.seq_len if self.has_documents else 0
        return self.documents_at + _up(documents, LINE_BYTES)

    @property
    def header_bytes(self) -> int:
        return LINE_BYTES + _up(8 * len(self.dp_ranks), LINE_BYTES)

    @property
    def slot_bytes(self) -> int:
        return self.header_bytes + len(self.dp_ranks) * self.share_bytes

    @property
    def num_bytes(self) -> int:
        return _up(2 * PAGE_BYTES + self.num_slots * self.slot_bytes, PAGE_BYTES)

    def slot_at(self, slot: int) -> int:
        return 2 * PAGE_BYTES + slot * self.slot_bytes

    def share_at(self, slot: int, share: int) -> int:
        return self.slot_at(slot) + self.header_bytes + share * self.share_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RingShape:
        return cls(**values | {"dp_ranks": tuple(values["dp_ranks"])})


def offsets(shapes: Iterable[RingShape]) -> list[int]:
    """Where rings begin that lie behind each other, and the end of the last."""
    found = [0]
    for shape in shapes:
        found.append(found[-1] + shape.num_bytes)
    return found
