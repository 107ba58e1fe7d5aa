"""A ring of global batches in shared memory, written by one loader, read by the ranks of a node.

Words of 8 bytes, each stored by one side alone, with a single aligned store:

| word | writer | meaning |
|---|---|---|
| 0 | loader | magic |
| 1 | loader | monotonic ns of its last sign of life |
| 2 | loader | sample number that it is reading |
| 3 | loader | stamp of the batch that it could not read; `ALL`: none will come any more |
| 4 | loader | CRC-32 and length of its last words, which lie on the next page |
| 5 | loader | exit code of the class of `errors.py` that they are of |
| 16 + r | rank r of the node | stamp of the last batch that it has copied |
| `FIRST_STAMP` + s | loader | stamp of the batch in slot s |

A stamp is generation << 40 | n + 1 for batch n. A generation is a position to read from: a rollback
begins the next one, and a reader sees nothing of another generation than its own. Slot n mod K is
written when every reader is in this generation and has copied batch n - K.

Python cannot order stores on a weakly ordered CPU, so each share has a CRC-32 over the bytes that
count (6 GB/s here), compared with what the reader copied: a stamp that is seen before its bytes
costs another look, never a wrong token.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.data.node.shape import (
    FIRST_READER,
    FIRST_STAMP,
    LINE_BYTES,
    PAGE_BYTES,
    WORDS_AT,
    RingShape,
)

MAGIC = int.from_bytes(b"MSRING01", "little")
ALL = (1 << 64) - 1
_ALIVE, _READING, _FAILED, _WORDS, _KIND = 1, 2, 3, 4, 5
_MOST_WORDS = 2048


def stamp(generation: int, batch: int) -> int:
    """`batch` counts from 0; -1: none yet."""
    assert 0 < generation < 1 << 23, generation
    assert -1 <= batch < (1 << 40) - 1, batch
    return generation << 40 | (batch + 1)


@dataclass(frozen=True)
class Share:
    """Views of one data rank's rows in a slot."""

    windows_RW: NDArray[np.int32]
    mask_bits_RM: NDArray[np.uint8]
    documents_RS: NDArray[np.int32] | None

    def rows(self, num: int) -> Share:
        documents = None if self.documents_RS is None else self.documents_RS[:num]
        return Share(self.windows_RW[:num], self.mask_bits_RM[:num], documents)

    def copy(self) -> Share:
        documents = None if self.documents_RS is None else self.documents_RS.copy()
        return Share(self.windows_RW.copy(), self.mask_bits_RM.copy(), documents)

    def checksum(self) -> int:
        crc = zlib.crc32(self.mask_bits_RM.data, zlib.crc32(self.windows_RW.data))
        return crc if self.documents_RS is None else zlib.crc32(self.documents_RS.data, crc)


class Ring:
    """The memory of one ring, at either end."""

    def __init__(self, memory: memoryview, shape: RingShape) -> None:
        assert len(memory) >= shape.num_bytes, (len(memory), shape.num_bytes)
        self.shape = shape
        self._bytes = np.frombuffer(memory, np.uint8, shape.num_bytes)
        self._words = memory[:PAGE_BYTES].cast("Q")
        self._memory = memory

    def close(self) -> None:
        """Let go of the memory, so that it can be unmapped."""
        self._words.release()
        self._bytes = np.empty(0, np.uint8)
        self._memory.release()

    def share(self, slot: int, share: int) -> Share:
        shape, at = self.shape, self.shape.share_at(slot, share)
        rows, seq_len = shape.num_rows, shape.seq_len
        return Share(
            self._array(at, np.int32, rows, seq_len + 1),
            self._array(at + shape.mask_at, np.uint8, rows, shape.mask_bytes),
            self._array(at + shape.documents_at, np.int32, rows, seq_len)
            if shape.has_documents
            else None,
        )

    # ------------------------------------------------------------ the loader's end

    def clear(self) -> None:
        """Before anybody attaches."""
        self._bytes[: 2 * PAGE_BYTES] = 0
        self._words[0] = MAGIC

    def alive(self, reading: int) -> None:
        """Loader: it works on sample number `reading`."""
        self._words[_READING] = reading
        self._words[_ALIVE] = time.monotonic_ns()

    def may_fill(self, generation: int, batch: int) -> bool:
        """Whether every reader is done with what slot `batch` mod K holds."""
        least = stamp(generation, max(-1, batch - self.shape.num_slots))
        return all(least <= word < stamp(generation + 1, -1) for word in self.readers())

    def publish(self, generation: int, batch: int, num_rows: int) -> None:
        """The batch is whole."""
        slot = batch % self.shape.num_slots
        checksums = self._array(
            self.shape.slot_at(slot) + LINE_BYTES, np.uint64, 1, len(self.shape.dp_ranks)
        )[0]
        for share in range(len(self.shape.dp_ranks)):
            checksums[share] = self.share(slot, share).rows(num_rows).checksum()
        self._words[FIRST_STAMP + slot] = stamp(generation, batch)

    def fail(self, failed: int, words: str, exit_code: int) -> None:
        """The batch of stamp `failed` cannot be read (`ALL`: none), and why."""
        text = words.encode(errors="replace")[:_MOST_WORDS]
        self._bytes[WORDS_AT : WORDS_AT + len(text)] = np.frombuffer(text, np.uint8)
        self._words[_WORDS] = zlib.crc32(text) << 32 | len(text)
        self._words[_KIND] = exit_code
        self._words[_FAILED] = failed

    # ------------------------------------------------------------ a rank's end

    def is_whole(self, generation: int, batch: int) -> bool:
        word: int = self._words[FIRST_STAMP + batch % self.shape.num_slots]
        return word == stamp(generation, batch)

    def copy(self, batch: int, share: int, num_rows: int) -> Share | None:
        """A copy of a share of a batch that `is_whole`; None where its bytes are not there yet."""
        slot = batch % self.shape.num_slots
        copied = self.share(slot, share).rows(num_rows).copy()
        at = self.shape.slot_at(slot) + LINE_BYTES
        expected = int(self._array(at, np.uint64, 1, len(self.shape.dp_ranks))[0, share])
        return copied if copied.checksum() == expected else None

    def has_read(self, reader: int, generation: int, batch: int) -> None:
        """Rank `reader` of the node needs `batch` no more; -1: it begins this generation."""
        self._words[FIRST_READER + reader] = stamp(generation, batch)

    def readers(self) -> list[int]:
        """The stamp of each reader's last batch."""
        return self._words[FIRST_READER : FIRST_READER + self.shape.num_readers].tolist()

    def failed(self) -> int:
        """Stamp of the batch that cannot be read; 0: none; `ALL`: every one from now on."""
        word: int = self._words[_FAILED]
        return word

    def last_words(self) -> tuple[str, int]:
        """What the loader said when it failed, and the exit code of the error's class; empty where
        it said nothing."""
        crc, length = divmod(self._words[_WORDS], 1 << 32)
        text = self._bytes[WORDS_AT : WORDS_AT + min(length, _MOST_WORDS)].tobytes()
        words = text.decode(errors="replace") if zlib.crc32(text) == crc else ""
        return words, self._words[_KIND]

    def reading(self) -> tuple[int, float]:
        """The sample number that the loader reads, and for how many seconds."""
        seconds = (time.monotonic_ns() - self._words[_ALIVE]) / 1e9
        return self._words[_READING], seconds

    def is_ours(self) -> bool:
        return bool(self._words[0] == MAGIC)

    def _array(self, at: int, dtype: Any, rows: int, columns: int) -> NDArray[Any]:
        num_bytes = rows * columns * np.dtype(dtype).itemsize
        return self._bytes[at : at + num_bytes].view(dtype).reshape(rows, columns)
