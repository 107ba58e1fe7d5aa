"""Documents that are tokens already: Megatron's `PREFIX.bin` and `PREFIX.idx`, taken as they are.

The sequences of a document are joined. What does not fit the tokenizer is refused, not mended: one
id outside the vocabulary says that all of the file was made with another tokenizer. The end of a
document alone is added where it is missing, and counted.

The tokens are read, not mapped: a file that is cut short meanwhile is an error with a name, where a
map would kill the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.data.indexed import IndexedTokens
from megascale.data.inputs.documents import Document, SourceFile, TokenDocument
from megascale.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenSegment:
    """Documents [first, first + len(ends)) of a token file."""

    file: SourceFile  # PREFIX.bin
    dtype: str
    first: int
    start: int  # byte of the first document
    ends: NDArray[np.int64]  # byte behind each

    @property
    def num_bytes(self) -> int:
        return int(self.ends[-1]) - self.start

    def read(self) -> Iterator[Document]:
        start = self.start
        with self.file.opened() as file:
            file.seek(start)
            for number, end in enumerate(self.ends.tolist(), start=self.first):
                raw = file.read(end - start)
                if len(raw) < end - start:
                    raise DataError(f"{self.file.path} was cut short while it was being read")
                tokens = np.frombuffer(raw, self.dtype)
                yield TokenDocument(tokens, f"{self.file.path}, document {number}")
                start = end


def token_segments(prefix: Path, segment_bytes: int) -> list[TokenSegment]:
    """The documents of PREFIX.bin in segments of about `segment_bytes`. Raises DataError for a
    missing, half-written or damaged index, and for a .bin that is not as long as its index says."""
    for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
        if not Path(f"{prefix}{suffix}").is_file():
            raise DataError(
                f"{prefix}{other} has no {prefix.name}{suffix} beside it, so it was not written to "
                "its end; make both again, or leave it out"
            )
    file = SourceFile.of(Path(f"{prefix}.bin"))
    indexed = IndexedTokens(prefix)
    offsets = indexed.document_offsets() * indexed.dtype.itemsize
    segments = []
    first = 0
    while first < indexed.num_documents:
        stop = int(np.searchsorted(offsets, offsets[first] + segment_bytes, side="left"))
        stop = min(max(stop, first + 1), indexed.num_documents)
        ends = offsets[first + 1 : stop + 1].copy()
        segments.append(TokenSegment(file, indexed.dtype.str, first, int(offsets[first]), ends))
        first = stop
    return segments
