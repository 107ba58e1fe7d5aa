"""Text files and lines of JSON, cut at byte offsets; compressed lines of JSON, read in order.

A file of text is a document; one larger than a segment is cut at line ends into documents of about
64 KiB, so that a whole library in one file still makes a validation split. Each line of a `.jsonl`
is an object, a document its "text" (or another key).

Invariant: a document belongs to the segment in which its first byte lies, and so to exactly one.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO

from megascale.data.inputs.documents import Document, Kind, Skipped, SourceFile, decode, nearest
from megascale.errors import DataError, require_extra

_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class TextSegment:
    """The documents of a text file that begin in bytes [start, stop)."""

    file: SourceFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def read(self) -> Iterator[Document]:
        with self.file.opened() as file:
            if self.num_bytes == self.file.num_bytes:
                yield decode(file.read(), str(self.file.path))
                return
            for offset, piece in self._pieces(file):
                yield decode(piece, f"{self.file.path} at byte {offset}")

    def _pieces(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        piece, start = bytearray(), self.start
        for offset, line in _lines(file, self.start, self.stop):
            start = start if piece else offset
            piece += line
            if len(piece) >= _PIECE_BYTES:
                yield start, bytes(piece)
                piece.clear()
        if piece:
            yield start, bytes(piece)


@dataclass(frozen=True)
class JsonSegment:
    """The lines of a `.jsonl` that begin in bytes [start, stop)."""

    file: SourceFile
    start: int
    stop: int
    text_key: str

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def read(self) -> Iterator[Document]:
        with self.file.opened() as file:
            for offset, line in _lines(file, self.start, self.stop):
                where = f"{self.file.path} at byte {offset}"
                yield from _json_text(line, where, self.text_key)


def _lines(file: IO[bytes], start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of the lines that begin in bytes [start, stop)."""
    if start:  # the rest of a line that began before belongs to the segment before
        file.seek(start - 1)
        file.readline()
    offset = file.tell()
    while offset < stop and (line := file.readline()):
        yield offset, line
        offset += len(line)


def _json_text(line: bytes, where: str, text_key: str) -> Iterator[Document]:
    """The document of a line, none of a blank one."""
    text = decode(line, where)
    if isinstance(text, Skipped):
        yield text
        return
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of more digits than Python reads
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: not a line of JSON that can be read ({why}); repair it"
        ) from None
    keys = value if isinstance(value, dict) else None
    found = keys.get(text_key, keys) if keys else value
    if found is None and keys:
        yield Skipped(Kind.NULL, where)
    elif isinstance(found, str):
        # JSON can spell half of a surrogate pair, which is not text
        yield decode(found.encode("utf-8", "surrogatepass"), where)
    else:
        raise DataError(
            f'{where}: expected an object with a string "{text_key}", got {text[:80].strip()}'
            + (f"; {nearest(text_key, keys)} (--text-column)" if keys and found is keys else "")
        )


COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass
class CompressedJson:
    """A `.jsonl.gz` or `.jsonl.zst`. One that is cut short is kept up to there; one that changed
    inside is refused: its checksum comes at the end."""

    file: SourceFile
    text_key: str
    done_bytes: int = field(default=0, init=False)

    @property
    def num_bytes(self) -> int:
        return self.file.num_bytes

    def read(self) -> Iterator[Document]:
        self.done_bytes = 0
        with self.file.opened() as raw, closing(self._decompressed(raw)) as lines:
            number = 0
            while True:
                number += 1
                where = f"{self.file.path} at line {number}"
                try:
                    line = lines.readline()
                except EOFError as error:
                    yield Skipped(Kind.FILE_END, f"{where}: {error}")
                    break
                except (gzip.BadGzipFile, zlib.error, OSError) as error:
                    if isinstance(error, OSError) and error.errno is not None:
                        raise  # the storage, not the file
                    if "Truncated" in str(error):  # Arrow's word; it has no class for it
                        yield Skipped(Kind.FILE_END, f"{where}: {error}")
                        break
                    raise DataError(
                        f"{where}: the file is damaged ({error}), and nothing tells how much of "
                        "its text is right; copy it again, or leave it out"
                    ) from None
                if not line:
                    break
                self.done_bytes = min(raw.tell(), self.num_bytes)
                yield from _json_text(line, where, self.text_key)
        self.done_bytes = self.num_bytes

    def _decompressed(self, raw: IO[bytes]) -> gzip.GzipFile | io.BufferedReader:
        if COMPRESSIONS[self.file.path.suffix.lower()] == "gzip":
            return gzip.GzipFile(fileobj=raw)
        try:
            import pyarrow
        except ImportError:
            raise require_extra("pyarrow", "data") from None
        unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
        return io.BufferedReader(unpacked)
