"""Data sets by name, `hf:NAME[:CONFIG[:SPLIT]]`, through Hugging Face's `datasets` as streams.

NAME is a data set of the hub or a folder of files that `datasets` reads. Nothing is stored on disk:
the rows come as they are asked for, in the data set's own order, and come again for each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.data.inputs.documents import Document
from megascale.data.inputs.tables import column_texts, require_text_column, saved_dataset_files
from megascale.errors import DataError, require_extra

PREFIX = "hf:"
_BATCH_ROWS = 256
_FORM = "hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT (CONFIG may be empty; the split is train)"


@dataclass(frozen=True)
class HubDataset:
    """One split of a data set, read in order."""

    name: str
    config: str | None
    split: str
    column: str
    num_bytes: int = 0  # not known
    done_bytes: int = 0

    def read(self) -> Iterator[Document]:
        row = 0
        for table in self._tables(_BATCH_ROWS):
            yield from column_texts(table.column(self.column), f"{self}, row ", row)
            row += table.num_rows

    def require_column(self) -> None:
        """Raise DataError where the data set is not to be had, or has no text in the column."""
        first = next(self._tables(1), None)
        if first is None:
            raise DataError(f"{self} has no rows; name another split or data set")
        require_text_column(first.schema, self.column, str(self))

    def _tables(self, num_rows: int) -> Iterator[Any]:
        try:
            import datasets
        except ImportError:
            raise require_extra("datasets", "data") from None
        try:
            rows = datasets.load_dataset(
                self.name, self.config, split=self.split, streaming=True
            ).with_format("arrow")
            yield from rows.iter(batch_size=num_rows)
        except Exception as error:  # of the library, the network, or the data set
            raise DataError(
                f"{self} could not be read: {type(error).__name__}: {error}; the form is {_FORM}"
            ) from error

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}:{self.config or ''}:{self.split}"


def named_dataset(name: str, column: str) -> HubDataset:
    """The data set that `hf:...` names. Raises DataError for another form."""
    fields = name.removeprefix(PREFIX).split(":")
    if not fields[0] or len(fields) > 3:
        raise DataError(f"input {name!r} is not a data set; the form is {_FORM}")
    if saved_dataset_files(Path(fields[0])) is not None:
        raise DataError(
            f"{fields[0]} is a folder of datasets.save_to_disk, to be named without {PREFIX!r}: "
            f"--input {fields[0]}"
        )
    config = fields[1] if len(fields) > 1 else ""
    split = fields[2] if len(fields) > 2 else ""
    return HubDataset(fields[0], config or None, split or "train", column)
