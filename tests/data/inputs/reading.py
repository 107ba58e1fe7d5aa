"""What an input gives, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

from megascale.data.inputs.documents import Document, Kind, Skipped
from megascale.data.sources import find_sources


def documents(*names: Path | str, text_column: str = "text") -> list[Document]:
    tasks = find_sources([str(name) for name in names], text_column).tasks()
    return [document for task in tasks for part in task for document in part.read()]


def kinds(read: list[Document]) -> list[Kind]:
    return [document.kind for document in read if isinstance(document, Skipped)]
