"""Columns of text: Parquet files by row group, Arrow files by record batch.

A row group of up to 16 MiB is a part that any worker reads; a larger one is read in order in
batches of rows, so that memory does not grow with it. A row group that cannot be read is left out
whole, with what could be read of it: a large one is therefore read twice, once to see that it can
be (0.5 GB/s, a hundredth of what tokenising takes).

Invariant: which documents there are does not depend on how the file is cut into row groups, batches
or portions, but for row groups that are broken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megascale.data.inputs.documents import (
    Document,
    Kind,
    Part,
    Skipped,
    SourceFile,
    Stream,
    decode,
    nearest,
)
from megascale.errors import DataError, require_extra

_LARGE_GROUP_BYTES = 16 << 20
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 4096
_READ_BYTES = 1 << 20


def parquet_parts(path: Path, column: str) -> list[Part | Stream]:
    """A part or, of a large one, a stream for each row group. Raises DataError where the file is no
    Parquet file or has no text in `column`."""
    file = SourceFile.of(path)
    with file.opened() as raw:
        try:
            opened = _parquet(raw)
        except (_arrow().ArrowInvalid, OSError) as error:
            _raise_where_storage_failed(error)
            raise DataError(
                f"{path} is not a whole Parquet file ({error}); write it again, or leave it out"
            ) from None
        require_text_column(opened.schema_arrow, column, str(path))
        metadata = opened.metadata
    place = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == column)
    parts: list[Part | Stream] = []
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        num_bytes = group.column(place).total_uncompressed_size
        kind = LargeRowGroup if num_bytes > _LARGE_GROUP_BYTES else RowGroup
        parts.append(kind(file, column, i, group.num_rows, num_bytes))
    return parts


@dataclass(frozen=True)
class RowGroup:
    """One row group of a Parquet file."""

    file: SourceFile
    column: str
    index: int
    num_rows: int
    num_bytes: int

    def read(self) -> Iterator[Document]:
        try:
            documents = [document for batch in self.batches() for document in batch]
        except BrokenError as error:
            documents = [Skipped(Kind.ROW_GROUP, f"{self.where}: {error}")]
        yield from documents

    @property
    def where(self) -> str:
        return f"{self.file.path}, row group {self.index}"

    def batches(self) -> Iterator[Iterator[Document]]:
        """The documents, by batches of rows. Raises BrokenError."""
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * self.num_rows // max(self.num_bytes, 1)))
        row = 0
        with self.file.opened() as raw:
            try:
                opened = _parquet(raw)
                for batch in opened.iter_batches(
                    rows, row_groups=[self.index], columns=[self.column], use_threads=False
                ):
                    yield column_texts(batch.column(0), f"{self.where}, row ", row)
                    row += batch.num_rows
            except (_arrow().ArrowException, OSError) as error:
                _raise_where_storage_failed(error)
                raise BrokenError(str(error).splitlines()[0]) from None
        if row != self.num_rows:
            raise BrokenError(f"{row} rows where its index says {self.num_rows}")


@dataclass
class LargeRowGroup:
    """A row group that is read in order, in bounded memory."""

    file: SourceFile
    column: str
    index: int
    num_rows: int
    num_bytes: int
    done_bytes: int = field(default=0, init=False)

    def read(self) -> Iterator[Document]:
        self.done_bytes = 0
        group = RowGroup(self.file, self.column, self.index, self.num_rows, self.num_bytes)
        try:
            for _ in group.batches():
                pass
        except BrokenError as error:
            yield Skipped(Kind.ROW_GROUP, f"{group.where}: {error}")
        else:
            rows = 0
            for batch in group.batches():
                for document in batch:
                    rows += 1
                    self.done_bytes = self.num_bytes * rows // self.num_rows
                    yield document
        self.done_bytes = self.num_bytes


class BrokenError(Exception):
    """A portion of a file that cannot be read; its neighbours may be."""


@dataclass
class ArrowFile:
    """A file of record batches, of either of Arrow's two formats. What follows a broken place is
    skipped: nothing says where the next batch begins."""

    file: SourceFile
    column: str
    done_bytes: int = field(default=0, init=False)

    @property
    def num_bytes(self) -> int:
        return self.file.num_bytes

    def read(self) -> Iterator[Document]:
        self.done_bytes = row = 0
        pyarrow = _arrow()
        with self.file.opened() as raw:
            batches = self._batches(raw)
            while True:
                where = f"{self.file.path}, row "
                try:
                    batch = next(batches, None)
                except (pyarrow.ArrowException, OSError) as error:
                    _raise_where_storage_failed(error)
                    yield Skipped(Kind.FILE_END, f"{where}{row}: {error}")
                    break
                if batch is None:
                    break
                self.done_bytes = min(raw.tell(), self.num_bytes)
                yield from column_texts(batch.column(self.column), where, row)
                row += batch.num_rows
        self.done_bytes = self.num_bytes

    def require_column(self) -> None:
        """Raise DataError where this is no Arrow file or has no text in the column."""
        with self.file.opened() as raw:
            try:
                schema = self._reader(raw).schema
            except (_arrow().ArrowException, OSError) as error:
                _raise_where_storage_failed(error)
                raise DataError(
                    f"{self.file.path} is not an Arrow file ({error}); write it again, or leave it "
                    "out"
                ) from None
        require_text_column(schema, self.column, str(self.file.path))

    def _reader(self, raw: IO[bytes]) -> Any:
        ipc = _arrow("pyarrow.ipc")
        magic = raw.read(6)
        raw.seek(0)
        return ipc.open_file(raw) if magic == b"ARROW1" else ipc.open_stream(raw)

    def _batches(self, raw: IO[bytes]) -> Iterator[Any]:
        reader = self._reader(raw)
        if hasattr(reader, "num_record_batches"):
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from reader


def saved_dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files, in order, of a folder that `datasets.save_to_disk` wrote; None: it is none.

    Raises DataError for a folder of several splits: which one is meant must be said.
    """
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    if splits.is_file():
        names = _described(splits, lambda values: [str(name) for name in values["splits"]])
        if len(names) != 1:
            named = ", ".join(str(folder / name) for name in names)
            raise DataError(f"{folder} holds a data set of several splits; name one of: {named}")
        return saved_dataset_files(folder / names[0])
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    names = _described(state, lambda values: [x["filename"] for x in values["_data_files"]])
    files = [folder / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)} that its state.json names")
    return files


def _described(path: Path, names: Callable[[Any], list[str]]) -> list[str]:
    """The names in a file that `datasets` wrote beside its data. Raises DataError."""
    try:
        return names(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({type(error).__name__}: {error}); copy it again, or name the "
            ".arrow files beside it"
        ) from None


def column_texts(column: Any, where: str, first_row: int) -> Iterator[Document]:
    """The documents of a column of text: Arrow does not check that its strings are UTF-8."""
    pyarrow = _arrow()
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    raw = column.cast(pyarrow.large_binary()).to_pylist()
    for row, value in enumerate(raw, start=first_row):
        place = f"{where}{row}"
        yield Skipped(Kind.NULL, place) if value is None else decode(value, place)


def require_text_column(schema: Any, column: str, where: str) -> None:
    """Raise DataError where `schema` has no `column`, or one that is not text."""
    types = _arrow().types
    names = schema.names
    if column not in names:
        raise DataError(
            f"{where} has no column {column!r}: {nearest(column, names)}; name it with "
            "--text-column"
        )
    if names.count(column) > 1:
        raise DataError(
            f"{where} has {names.count(column)} columns {column!r}, and nothing says which is "
            "meant; write it again with names of their own"
        )
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    raws = (types.is_binary, types.is_large_binary, types.is_binary_view)
    if not any(is_text(kind) for is_text in (*texts, *raws)):
        legal = [name for name in names if types.is_string(schema.field(name).type)]
        raise DataError(
            f"{where} has {kind} in the column {column!r}, not text; columns of text are "
            f"{', '.join(map(repr, legal)) or 'none'} (--text-column)"
        )


def _parquet(raw: IO[bytes]) -> Any:
    parquet = _arrow("pyarrow.parquet")
    # a buffer of its own size: a whole column of the row group would be fetched at once without
    return parquet.ParquetFile(
        raw, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _arrow(module: str = "pyarrow") -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise require_extra("pyarrow", "data") from None
    return {
        "pyarrow": pyarrow,
        "pyarrow.ipc": pyarrow.ipc,
        "pyarrow.parquet": pyarrow.parquet,
    }[module]


def _raise_where_storage_failed(error: Exception) -> None:
    """Arrow raises OSError for damaged data too, then without a number."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
