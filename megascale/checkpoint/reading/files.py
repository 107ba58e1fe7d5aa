"""The files of one checkpoint: sizes, headers, blocks, each told by the manifest.

Files are numbered in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megascale.checkpoint.layout import Entry, decode_header
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.reading.window import DamagedError, Source, make_buffer, read_verified
from megascale.errors import CheckpointError
from megascale.storage import BLOCK_BYTES, Storage

_NUM_THREADS = 8


@dataclass(frozen=True)
class Files:
    """What `manifest` says lies in `folder` of `storage`."""

    storage: Storage
    folder: str
    manifest: Manifest
    block_bytes: int = BLOCK_BYTES
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(sorted(self.manifest.files)))

    @property
    def where(self) -> str:
        return f"{self.storage.url}/{self.folder}"

    def layout_id(self) -> str:
        """Equal where the same pieces lie in the same places."""
        return " ".join(self.manifest.files[name].header_sha256 for name in self.names)

    def header(self, number: int) -> Source:
        saved = self.manifest.files[self.names[number]]
        return Source(self._path(number), 0, saved.header_bytes, saved.header_sha256)

    def block(self, number: int, index: int) -> Source:
        saved = self.manifest.files[self.names[number]]
        start = saved.header_bytes + index * self.block_bytes
        num_bytes = min(self.block_bytes, saved.num_bytes - start)
        return Source(self._path(number), start, num_bytes, saved.blocks[index])

    def check_sizes(self, numbers: Iterable[int]) -> None:
        """Raise DamagedError for a file that is missing, or longer or shorter than it was."""
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="size") as threads:
            list(threads.map(self._check_size, numbers))

    def read_headers(self, numbers: Iterable[int]) -> dict[int, list[Entry]]:
        """What lies in these files. Raises DamagedError where a header is not the saved one."""
        numbers = list(numbers)
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="header") as threads:
            return dict(zip(numbers, threads.map(self._read_header, numbers), strict=True))

    def _path(self, number: int) -> str:
        return f"{self.folder}/{self.names[number]}"

    def _check_size(self, number: int) -> None:
        name = self.names[number]
        got, expected = self.storage.size(self._path(number)), self.manifest.files[name].num_bytes
        if got is None:
            raise DamagedError(f"{self.where}: {name} is missing; use another checkpoint")
        if got != expected:
            raise DamagedError(
                f"{self.where}: {name} has {got:,} bytes, {expected:,} were saved; use another "
                "checkpoint"
            )

    def _read_header(self, number: int) -> list[Entry]:
        source, saved = self.header(number), self.manifest.files[self.names[number]]
        buffer = make_buffer(source.num_bytes, pinned=False)
        read_verified(self.storage, source, buffer.view)
        entries = decode_header(bytes(buffer.view), f"{self.where}/{self.names[number]}")
        stop = entries[-1].stop if entries else 0
        num_blocks = -(-stop // self.block_bytes)
        if stop != saved.num_bytes - saved.header_bytes or num_blocks != len(saved.blocks):
            raise CheckpointError(
                f"{self.where}: manifest and header of {self.names[number]} contradict each other; "
                "use another checkpoint"
            )
        for entry in entries:
            if entry.start % entry.dtype.itemsize:
                raise CheckpointError(
                    f"{self.where}/{self.names[number]}: {entry.name} begins at byte "
                    f"{entry.start}, inside of a value; use another checkpoint"
                )
        return entries
