"""What a place for files must do. Names are relative, with slashes: "step-00000100/COMMITTED".

Invariants of every storage:
1. What `write` and `put` wrote is durable when they return: file and name survive a power cut.
2. `put` leaves the old content or the new, never a half; `write` may leave a part under its name.
3. Nothing waits for ever: no progress for `stall_s` is an error that says where and for how long.

All errors are StorageErrors (a full disk, a folder that is gone, a refused credential, a stall, a
file that is shorter than asked), which say what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

BLOCK_BYTES = 16 << 20  # what one SHA-256 vouches for: the unit of reading


class Storage(Protocol):
    """A folder, or what stands for one.

    url       as `open_storage` takes it, for messages and for other processes
    is_local  a folder of this machine's file systems (which other machines may share)
    """

    url: str
    is_local: bool

    def claim(self, folder: str) -> bool:
        """Make `folder`; False where something has that name already. Of two callers at most one
        gets True (an object store cannot promise that: there one writer must claim)."""

    def names(self, folder: str = "") -> list[str]:
        """Files and folders directly in `folder`, sorted; [] where it is not there."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""

    def write(
        self, name: str, parts: Iterable[memoryview], moved: Callable[[int], None] = lambda _: None
    ) -> None:
        """A file of all `parts`, in order. `moved`: called with each number of bytes written.

        Parts may be of any size; whoever wants the full speed gives them page-aligned, in multiples
        of `BLOCK_BYTES` but for the last. A part may be reused once the next is asked for.
        """

    def put(self, name: str, data: bytes) -> None:
        """A small file, replaced where there is one."""

    def get(self, name: str) -> bytes:
        """A whole small file."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on."""

    def remove(self, name: str) -> None:
        """A file, or a folder and all in it; what is not there is no error."""

    def free_bytes(self) -> int | None:
        """Room that is left; None where nobody knows (an object store)."""


@dataclass(frozen=True)
class FileJob:
    """One file for a `FileWriter`: `header`, then `num_bytes` of `source` from `source_start` on.

    url      of the storage
    header   a multiple of 4,096 bytes
    source   a file that can be mapped: /dev/shm/..., /proc/PID/fd/N; must not change meanwhile
    """

    url: str
    name: str
    header: bytes
    source: str
    source_start: int
    num_bytes: int


@dataclass(frozen=True)
class Written:
    """What was written, and what vouches for it.

    num_bytes      of the file, header included
    header_sha256  hex
    blocks         hex SHA-256 of each `BLOCK_BYTES` behind the header; the last may be shorter
    seconds        from the first byte until durable
    """

    num_bytes: int
    header_sha256: str
    blocks: tuple[str, ...]
    seconds: float
