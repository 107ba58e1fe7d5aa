"""From what a user names to documents: globs, files, folders, `.jsonl`, or the word `stdlib`.

A file of text is a document; one larger than a segment (1 MiB) is cut at line ends into documents
of about 64 KiB, so that a whole library in one file still makes a validation split. Each line of a
`.jsonl` is a document, its "text". Work is handed out as `Segment`s, byte ranges of files, so that
one large file keeps every core busy.

Invariant: a document belongs to the segment in which its first byte lies, and so to exactly one.
The order of documents is the order of inputs, then of paths, whoever reads them.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.errors import DataError

STDLIB = "stdlib"
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_SEGMENT_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Segment:
    """The documents of `path` that begin in bytes [start, stop)."""

    path: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


Task = list[Segment]  # about a segment's bytes of whole files, or one segment: a worker's portion


def list_files(inputs: Sequence[str]) -> list[Path]:
    """The files that `inputs` name, in order, each once. Raises DataError for a name without any.

    `stdlib` is the running Python's standard library (`./stdlib` is a path); hidden files inside
    folders are left out.
    """
    if not inputs:
        raise DataError(f"no input; give files, folders, globs, or the word {STDLIB}")
    files: dict[Path, None] = {}
    for name in inputs:
        found = _stdlib_files() if name == STDLIB else _named_files(name)
        if not found:
            raise DataError(
                f"input {name!r} matches no file; give files, folders, globs, or the word {STDLIB}"
            )
        files.update(dict.fromkeys(found))
    return list(files)


def _stdlib_files() -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        # pruned before the walk enters: installed packages may be gigabytes
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED]
        files.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(files)


def _named_files(name: str) -> list[Path]:
    # a name that exists is meant literally, whatever brackets it has
    matches = [Path(name)] if os.path.exists(name) else map(Path, glob.glob(name, recursive=True))
    files: list[Path] = []
    for match in sorted(matches):
        files.extend(_folder_files(match) if match.is_dir() else [match])
    return files


def _folder_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]


def make_tasks(files: Sequence[Path]) -> list[Task]:
    """Cut `files` into segments and group them, in order, into tasks of about equal bytes."""
    tasks: list[Task] = []
    task_bytes = _SEGMENT_BYTES
    for path in files:
        size = path.stat().st_size
        for start in range(0, max(size, 1), _SEGMENT_BYTES):
            if task_bytes >= _SEGMENT_BYTES:
                tasks.append([])
                task_bytes = 0
            segment = Segment(path, start, min(start + _SEGMENT_BYTES, size))
            tasks[-1].append(segment)
            task_bytes += segment.num_bytes
    return tasks


def read_documents(task: Task) -> Iterator[str | None]:
    """The documents of a task in order; None for one that is not UTF-8."""
    for segment in task:
        if segment.path.suffix == ".jsonl":
            yield from _json_texts(segment)
        elif segment.start == 0 and segment.stop == segment.path.stat().st_size:
            yield _decode(segment.path.read_bytes())
        else:
            yield from map(_decode, _pieces(segment))


def _decode(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _lines(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of the lines that begin inside the segment."""
    with open(segment.path, "rb") as file:
        if segment.start:  # the rest of a line that began before belongs to the segment before
            file.seek(segment.start - 1)
            file.readline()
        while (offset := file.tell()) < segment.stop and (line := file.readline()):
            yield offset, line


def _pieces(segment: Segment) -> Iterator[bytes]:
    piece = bytearray()
    for _, line in _lines(segment):
        piece += line
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _json_texts(segment: Segment) -> Iterator[str | None]:
    for offset, line in _lines(segment):
        text = _decode(line)
        if text is None:
            yield None
            continue
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{segment.path} at byte {offset}: not a line of JSON ({error.msg}); repair it"
            ) from None
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            raise DataError(
                f'{segment.path} at byte {offset}: expected an object with a string "text", '
                f"got {text[:80].strip()}"
            )
        # JSON can spell half of a surrogate pair, which is not text
        yield _decode(value["text"].encode("utf-8", "surrogatepass"))
