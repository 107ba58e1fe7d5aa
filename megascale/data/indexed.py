"""Token files in Megatron's `.bin/.idx` format: written once, then read from anywhere.

    PREFIX.bin   the tokens of all sequences, end to end
    PREFIX.idx   b"MMIDIDX\\0\\0", version u64 = 1, dtype code u8, sequence count u64, document
                 count u64, then lengths int32 [sequences], byte offsets int64 [sequences], and the
                 first sequence of each document int64 [documents]; little-endian, unpadded

Megatron counts documents with the closing end, so N documents are N + 1 entries, the last of them
the sequence count. The byte layout is Megatron's, so files move both ways without conversion.

Invariant: a reader that opens has every byte that its index promises, and an index whose parts
agree. A file cut short, or an index of another file, is refused before the first token is read.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CHUNK = 1 << 16  # documents that are indexed at a time
_UINT16_BELOW = 65500  # Megatron's bound, lower than the type's own


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype that Megatron would choose for token ids below `vocab_size`."""
    return np.dtype("<u2" if vocab_size < _UINT16_BELOW else "<i4")


def _with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.parent / (prefix.name + suffix)  # Path.with_suffix would eat a dot in the name


class IndexedWriter:
    """Appends documents to PREFIX.bin; `close` writes PREFIX.idx. One sequence a document.

    The lengths wait in PREFIX.lengths until then, so that memory does not grow with the documents.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self._prefix = prefix
        self._bin = open(_with_suffix(prefix, ".bin"), "wb")  # noqa: SIM115 - until close()
        self._lengths = open(_with_suffix(prefix, ".lengths"), "w+b")  # noqa: SIM115 - as well
        self._num_documents = 0

    def add(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Append documents: their tokens end to end, and the length of each."""
        assert lengths.sum() == len(tokens), (lengths.sum(), len(tokens))
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.write(lengths.astype("<i4").data)
        self._num_documents += len(lengths)

    def close(self) -> None:
        """Close the tokens and write their index."""
        self._bin.close()
        num = self._num_documents
        code = next(code for code, name in _DTYPES.items() if np.dtype(name) == self.dtype)
        with open(_with_suffix(self._prefix, ".idx"), "wb") as idx:
            idx.write(_HEADER.pack(_MAGIC, _VERSION, code, num, num + 1))
            for lengths in self._stored_lengths():
                idx.write(lengths.data)
            start = 0
            for lengths in self._stored_lengths():
                ends = start + np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
                idx.write(np.concatenate([[start], ends[:-1]]).astype("<i8").data)
                start = int(ends[-1])
            for first in range(0, num + 1, _CHUNK):
                idx.write(np.arange(first, min(first + _CHUNK, num + 1), dtype="<i8").data)
        self._discard_lengths()

    def _stored_lengths(self) -> Iterator[NDArray[np.int32]]:
        self._lengths.seek(0)
        while raw := self._lengths.read(4 * _CHUNK):
            yield np.frombuffer(raw, "<i4")

    def _discard_lengths(self) -> None:
        self._lengths.close()
        _with_suffix(self._prefix, ".lengths").unlink()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._bin.close()  # no index: what was written is not a token file
            self._discard_lengths()


class IndexedTokens:
    """A token file.

    tokens           all tokens in stored order, [tokens], in the file's own dtype, mapped
    lengths          tokens of each sequence, int32 [sequences]
    """

    def __init__(self, prefix: Path) -> None:
        """Open PREFIX.bin and PREFIX.idx. Raises DataError where they are missing, cut short,
        empty, or not what they claim to be."""
        self.prefix = prefix
        idx, bin_ = _with_suffix(prefix, ".idx"), _with_suffix(prefix, ".bin")
        idx_bytes, bin_bytes = _size(idx), _size(bin_)
        self.dtype, sequences, documents = _read_header(idx, idx_bytes)
        _require_bytes(idx, _HEADER.size + 12 * sequences + 8 * documents, idx_bytes)
        if sequences == 0:
            raise DataError(f"{idx} holds no sequences; prepare the data again with some text")
        raw = np.memmap(idx, mode="r").view(np.ndarray)
        arrays = np.split(raw[_HEADER.size :], [4 * sequences, 12 * sequences])
        self.lengths: NDArray[np.int32] = arrays[0].view("<i4")
        self._starts: NDArray[np.int64] = arrays[1].view("<i8")
        self._documents: NDArray[np.int64] = arrays[2].view("<i8")
        ends = np.cumsum(self.lengths, dtype=np.int64) * self.dtype.itemsize
        if ends[-1] == 0:
            raise DataError(f"{idx} holds no tokens; prepare the data again with some text")
        self._require_agreement(idx, ends)
        _require_bytes(bin_, int(ends[-1]), bin_bytes)
        self.tokens: NDArray[Any] = np.memmap(bin_, dtype=self.dtype, mode="r").view(np.ndarray)
        self._descriptor = os.open(bin_, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of document `index`, a view of the file."""
        first, last = self._documents[index : index + 2]
        return self.tokens[self._token_offset(first) : self._token_offset(last)]

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start to stop of the file, read and not mapped: a file that is cut short meanwhile
        or a storage that fails is a DataError with a name, where a map kills the process (SIGBUS).
        """
        size = self.dtype.itemsize
        bin_ = _with_suffix(self.prefix, ".bin")
        try:
            raw = os.pread(self._descriptor, (stop - start) * size, start * size)
        except OSError as error:
            raise DataError(
                f"{bin_} cannot be read ({error.strerror}); look at its storage"
            ) from error
        if len(raw) < (stop - start) * size:
            raise DataError(
                f"{bin_} was cut short after it was opened: it has no token {stop - 1} any more; "
                "copy or prepare it again"
            )
        return np.frombuffer(raw, self.dtype)

    def document_offsets(self) -> NDArray[np.int64]:
        """First token of each document, and the end of the last: int64 [documents + 1]."""
        ends = np.append(self._starts, len(self.tokens) * self.dtype.itemsize)
        return ends[self._documents] // self.dtype.itemsize

    def _require_agreement(self, idx: Path, ends: NDArray[np.int64]) -> None:
        """`ends`: running sum of the lengths, in bytes."""
        documents = self._documents
        if self.lengths.min() < 0:
            wrong = "a sequence has a negative length"
        elif self._starts[0] != 0 or not np.array_equal(self._starts[1:], ends[:-1]):
            wrong = "its byte offsets are not the running sum of its lengths"
        elif not len(documents) or documents[0] != 0 or documents[-1] != len(ends):
            wrong = f"its documents do not span its {len(ends)} sequences"
        elif (np.diff(documents) < 0).any():
            wrong = "a document ends before it begins"
        else:
            return
        raise DataError(f"{idx} is damaged: {wrong}; copy or prepare it again")

    def _token_offset(self, sequence: int) -> int:
        if sequence == len(self._starts):
            return len(self.tokens)
        return int(self._starts[sequence]) // self.dtype.itemsize


def _size(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"token file {path} does not exist; make it with `megascale data prepare`")
    return path.stat().st_size


def _read_header(idx: Path, idx_bytes: int) -> tuple[np.dtype[Any], int, int]:
    """(dtype of the tokens, sequence count, document count)."""
    if idx_bytes < _HEADER.size:
        _require_bytes(idx, _HEADER.size, idx_bytes)
    with open(idx, "rb") as file:
        magic, version, code, sequences, documents = _HEADER.unpack(file.read(_HEADER.size))
    if magic != _MAGIC:
        raise DataError(f"{idx} begins with {magic!r}, not {_MAGIC!r}: not a token index")
    if version != _VERSION:
        raise DataError(f"{idx} has format version {version}; this program reads {_VERSION}")
    dtype = np.dtype(_DTYPES[code]) if code in _DTYPES else None
    if dtype is None or dtype.kind == "f":
        raise DataError(f"{idx} has dtype code {code}; tokens are integers, codes 1 to 5 and 8")
    return dtype, sequences, documents


def _require_bytes(path: Path, expected: int, actual: int) -> None:
    if actual == expected:
        return
    what = "is cut short" if actual < expected else "does not match its index"
    raise DataError(
        f"{path} {what}: expected {expected} bytes, found {actual}; copy or prepare it again"
    )
