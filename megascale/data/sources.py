"""From what a user names to portions of documents: files, folders, globs, data sets, `stdlib`.

What a file is, its name says: `.parquet`, `.arrow`, `.jsonl` (also `.jsonl.gz`, `.jsonl.zst`),
`.bin` with `.idx`; all else is text. A folder that `datasets.save_to_disk` wrote is one data set.
Work is handed out as tasks, about a segment (1 MiB) of parts of files each, so that one large file
keeps every core busy; what can only be read in order is a stream, cut into tasks as it is read.

Invariant: the order of documents is the order of inputs, then of paths, whoever reads them.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megascale.data.inputs.documents import Part, SourceFile, Stream, Task, portions
from megascale.data.inputs.hub import PREFIX, named_dataset
from megascale.data.inputs.tables import ArrowFile, parquet_parts, saved_dataset_files
from megascale.data.inputs.text import COMPRESSIONS, CompressedJson, JsonSegment, TextSegment
from megascale.data.inputs.token_files import TokenSegment, token_segments
from megascale.errors import DataError

STDLIB = "stdlib"
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_SEGMENT_BYTES = 1 << 20
_LEGAL = (
    "give files, folders, globs, prefixes of .bin and .idx, data sets as "
    f"{PREFIX}NAME:CONFIG:SPLIT, or the word {STDLIB}"
)


@dataclass(frozen=True)
class Sources:
    """All inputs, in order.

    entries      tasks, ready to be handed out, and streams
    num_files    files that were named, a data set of the hub and a pair of .bin and .idx being one
    """

    entries: list[Task | Stream]
    num_files: int

    def tasks(self) -> Generator[Task]:
        """All documents in order; streams are read meanwhile."""
        for entry in self.entries:
            yield from entry_tasks(entry)

    @property
    def num_bytes(self) -> int:
        return sum(map(entry_bytes, self.entries))

    @property
    def token_files(self) -> list[str]:
        """Inputs that are tokens already."""
        parts = (part for entry in self.entries if isinstance(entry, list) for part in entry)
        names = (str(part.file.path) for part in parts if isinstance(part, TokenSegment))
        return list(dict.fromkeys(names))


def entry_tasks(entry: Task | Stream) -> Generator[Task]:
    if isinstance(entry, list):
        yield entry
    else:
        yield from portions(entry, _SEGMENT_BYTES)


def entry_bytes(entry: Task | Stream) -> int:
    if isinstance(entry, list):
        return sum(part.num_bytes for part in entry)
    return entry.num_bytes


def find_sources(inputs: Sequence[str], text_column: str = "text") -> Sources:
    """What `inputs` name. Raises DataError where something is absent or not what its name says,
    before any of it is read."""
    named = list_inputs(inputs)
    entries: list[Task | Stream] = []
    task_bytes = _SEGMENT_BYTES
    for source in named:
        for part in _parts(source, text_column):
            if isinstance(part, Stream):
                entries.append(part)
                task_bytes = _SEGMENT_BYTES
                continue
            if task_bytes >= _SEGMENT_BYTES:
                task: Task = []
                entries.append(task)
                task_bytes = 0
            task.append(part)
            task_bytes += part.num_bytes
    return Sources(entries, len(named))


def list_inputs(inputs: Sequence[str]) -> list[Path | str]:
    """The files (of token files the .bin) and `hf:` names that `inputs` name, in order, each once.

    `stdlib` is the running Python's standard library (`./stdlib` is a path); hidden files inside
    folders are left out. Raises DataError for a name that names nothing.
    """
    if not inputs:
        raise DataError(f"no input; {_LEGAL}")
    named: dict[Path | str, None] = {}
    for name in inputs:
        if name.startswith(PREFIX):
            named[name] = None
            continue
        found = _stdlib_files() if name == STDLIB else _named_files(name)
        if not found:
            raise DataError(f"input {name!r} matches no file; {_LEGAL}")
        named.update(dict.fromkeys(found))
    return list(named)


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
    if not files and any(os.path.isfile(name + suffix) for suffix in (".bin", ".idx")):
        files = [Path(name + ".bin")]
    return [_bin_of(path) for path in files]


def _bin_of(path: Path) -> Path:
    """Both files of a pair are named by the one."""
    return (
        path.parent / (path.name.removesuffix(".idx") + ".bin") if path.suffix == ".idx" else path
    )


def _folder_files(folder: Path) -> list[Path]:
    if (folder / "meta.json").is_file() and (folder / "train.idx").is_file():
        raise DataError(
            f"{folder} is prepared already; to prepare its tokens again with other text, name "
            f"{folder / 'train'} and give its tokenizer"
        )
    saved = saved_dataset_files(folder)
    if saved is not None:
        return saved
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_file():
            files.append(path)
        elif path.is_dir() and not path.is_symlink():
            files.extend(_folder_files(path))
    return files


def _parts(source: Path | str, text_column: str) -> Sequence[Part | Stream]:
    if isinstance(source, str):
        dataset = named_dataset(source, text_column)
        dataset.require_column()
        return [dataset]
    suffixes = [suffix.lower() for suffix in source.suffixes]
    suffix = suffixes[-1] if suffixes else ""
    if suffix in (".parquet", ".parq"):
        return parquet_parts(source, text_column)
    if suffix == ".bin":
        return token_segments(source.with_suffix(""), _SEGMENT_BYTES)
    is_json_lines = suffixes[-2:-1] in ([".jsonl"], [".json"])
    if suffix in COMPRESSIONS and not is_json_lines:
        raise DataError(
            f"{source}: of compressed files those of lines of JSON are read (.jsonl{suffix}); "
            "unpack it, or leave it out"
        )
    if suffix not in (".arrow", ".jsonl") and not is_json_lines:
        return _cut(source, TextSegment)
    if suffix == ".jsonl":
        return _cut(source, partial(JsonSegment, text_key=text_column))
    file = SourceFile.of(source)
    if suffix == ".arrow":
        table = ArrowFile(file, text_column)
        table.require_column()
        return [table]
    if suffix not in COMPRESSIONS:
        raise DataError(
            f"{source}: {suffix} is no compression that is read; {' and '.join(COMPRESSIONS)} are"
        )
    return [CompressedJson(file, text_column)]


def _cut(path: Path, kind: Callable[[SourceFile, int, int], Part]) -> list[Part]:
    file = SourceFile.of(path)
    starts = range(0, max(file.num_bytes, 1), _SEGMENT_BYTES)
    return [kind(file, i, min(i + _SEGMENT_BYTES, file.num_bytes)) for i in starts]
