"""What an input gives, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from megascale.data.inputs.documents import Document, Kind, Skipped
from megascale.data.sources import find_sources


def documents(*names: Path | str, text_column: str = "text") -> list[Document]:
    tasks = find_sources([str(name) for name in names], text_column).tasks()
    return [document for task in tasks for part in task for document in part.read()]


def kinds(read: list[Document]) -> list[Kind]:
    return [document.kind for document in read if isinstance(document, Skipped)]


def break_row_group(path: Path, group: int) -> None:
    """Flip a bit in the middle of its last column, which is its text."""
    row_group = pq.ParquetFile(path).metadata.row_group(group)
    column = row_group.column(row_group.num_columns - 1)
    start = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(path.read_bytes())
    content[start + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
