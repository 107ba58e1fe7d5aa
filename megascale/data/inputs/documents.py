"""What every kind of input gives: documents, and places where a document could not be had.

A `Part` is a portion that any worker can read by itself (a byte range, a row group). A `Stream` has
no places to begin at (a compressed file, a data set that comes over the network): one process reads
it and hands its text out in portions.

Invariant: what is read is what was listed. A file whose size or time of change differs from the
moment it was listed is refused, so that no document is lost or read twice unnoticed.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import fstat, stat_result
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megascale.errors import DataError

Tokens = NDArray[np.integer[Any]]


class Kind(enum.StrEnum):
    """Why something of an input is left out; the fields `skipped_KIND` of `meta.json`."""

    UNDECODABLE = "undecodable"  # a document that is not UTF-8
    NULL = "null"  # a row without a text
    EMPTY = "empty"  # a document of no characters, or of no tokens
    ROW_GROUP = "row_groups"  # of a Parquet file, that cannot be read
    FILE_END = "file_ends"  # what follows a broken place of a file that is read in order


_REASONS = {
    Kind.UNDECODABLE: "not UTF-8",
    Kind.NULL: "no text",
    Kind.EMPTY: "an empty document",
    Kind.ROW_GROUP: "a broken row group",
    Kind.FILE_END: "cannot be read any further",
}


@dataclass(frozen=True)
class Skipped:
    """In a document's place: why there is none, and where."""

    kind: Kind
    where: str

    @property
    def reason(self) -> str:
        return _REASONS[self.kind]

    @property
    def is_broken(self) -> bool:
        """Whether the input is damaged, so that an unknown number of documents is lost."""
        return self.kind in (Kind.ROW_GROUP, Kind.FILE_END)


@dataclass(frozen=True)
class TokenDocument:
    """A document that is tokens already."""

    tokens: Tokens
    where: str


Document = str | TokenDocument | Skipped


class Part(Protocol):
    """Documents that lie together. Picklable; read by any process."""

    @property
    def num_bytes(self) -> int:
        """Size, for shares of work and progress."""

    def read(self) -> Iterator[Document]:
        """The documents in order."""


@runtime_checkable
class Stream(Protocol):
    """Documents that are read from the first to the last, by one process."""

    @property
    def num_bytes(self) -> int:
        """Size of the file, for progress; 0: not known."""

    @property
    def done_bytes(self) -> int:
        """How much of `num_bytes` the last `read` is through."""

    def read(self) -> Iterator[Document]:
        """The documents in order, from the first; bounded memory."""


Task = list[Part]  # a worker's portion: parts of about a segment's bytes together


@dataclass(frozen=True)
class Texts:
    """A portion of a stream."""

    documents: list[Document]
    num_bytes: int

    def read(self) -> Iterator[Document]:
        yield from self.documents


def portions(stream: Stream, portion_bytes: int) -> Generator[Task]:
    """The documents of `stream` in portions of about `portion_bytes`."""
    documents: list[Document] = []
    size = told = 0
    for document in stream.read():
        documents.append(document)
        size += len(document) if isinstance(document, str) else 0
        if size >= portion_bytes or len(documents) >= portion_bytes:
            yield [Texts(documents, stream.done_bytes - told)]
            documents, size, told = [], 0, stream.done_bytes
    if documents or told < stream.num_bytes:
        yield [Texts(documents, stream.num_bytes - told)]


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was listed."""

    path: Path
    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        with _told_if_gone(path):
            status = path.stat()
        if not S_ISREG(status.st_mode):
            raise DataError(
                f"{path} is no file but a pipe or a device, which can be read but once; write it "
                "to a file and name that"
            )
        return cls(path, *_identity(status))

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The file, open to read. Raises DataError where it is gone or another than was listed."""
        with _told_if_gone(self.path), open(self.path, "rb") as file:
            self._require_unchanged(fstat(file.fileno()))
            yield file
            # Arrow closes what it reads from
            now = self.path.stat() if file.closed else fstat(file.fileno())
            self._require_unchanged(now)

    def _require_unchanged(self, now: stat_result) -> None:
        if _identity(now) != (self.num_bytes, self.changed_ns):
            raise DataError(
                f"{self.path} changed while it was being read ({self.num_bytes:,} bytes before, "
                f"{now.st_size:,} now); prepare again when nothing writes to it"
            )


def _identity(status: stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


@contextmanager
def _told_if_gone(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            f"{path} vanished while it was being read; put it back, or prepare again without it"
        ) from None


def decode(raw: bytes, where: str) -> str | Skipped:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return Skipped(Kind.UNDECODABLE, where)


def nearest(name: str, legal: Iterable[str]) -> str:
    """The end of a refusal: what there is, and what is nearest to `name`."""
    names = list(legal)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there are {', '.join(map(repr, names)) or 'none'}{hint}"
