"""A folder of this machine's file systems: a disk, a mounted network file system, tmpfs.

Invariants 1 and 2 of `interface.py` here: a file's bytes are durable after fsync of the file, its
name after fsync of its folder; `put` writes a file beside and renames it.

A mount that is gone leaves its empty mount point, and a folder made there would fill the disk
below it. So the device of the root is noted when it is first met, and another one is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from megascale.errors import StorageError
from megascale.storage import direct
from megascale.storage.interface import BLOCK_BYTES
from megascale.storage.waiting import DEFAULT_STALL_S, Stalled, answer, move_all

T = TypeVar("T")
TEMPORARY = ".tmp"  # ends the name of a file that `put` has not finished
_UNTOUCHED = "Nothing was committed, older checkpoints are untouched, training can go on"


class LocalFolder:
    """`root` need not exist: the first `claim`, `write` or `put` makes it."""

    is_local = True

    def __init__(self, root: Path, *, stall_s: float = DEFAULT_STALL_S) -> None:
        self.root = root
        self.url = str(root)
        self._stall_s = stall_s
        self._device: int | None = None

    def claim(self, folder: str) -> bool:
        def make() -> bool:
            path = self.root / folder
            self._make_folders(path.parent)
            try:
                path.mkdir()
            except FileExistsError:
                return False
            fsync_folder(path.parent)
            return True

        return self._ask(make, f"making {folder} in {self.url}")

    def names(self, folder: str = "") -> list[str]:
        def look() -> list[str]:
            try:
                names = sorted(os.listdir(self.root / folder))
            except (FileNotFoundError, NotADirectoryError):
                names = []
            if not names and self._device is not None:  # seen before: gone, or truly empty?
                self._refuse_another_device(self.root)
            return names

        return self._ask(look, f"listing {folder or 'what lies'} in {self.url}")

    def size(self, name: str) -> int | None:
        def look() -> int | None:
            path = self.root / name
            return path.stat().st_size if path.is_file() else None

        return self._ask(look, f"looking for {name} in {self.url}")

    def modified_s(self, name: str) -> float | None:
        """Seconds since 1970; None where there is no such file."""

        def look() -> float | None:
            path = self.root / name
            return path.stat().st_mtime if path.is_file() else None

        return self._ask(look, f"looking for {name} in {self.url}")

    def write(
        self, name: str, parts: Iterable[memoryview], moved: Callable[[int], None] = lambda _: None
    ) -> None:
        path = self.root / name
        doing = f"writing {name} to {self.url}"
        written_bytes = part_bytes = 0

        def count(num_bytes: int) -> None:
            nonlocal written_bytes
            written_bytes += num_bytes
            moved(num_bytes)

        def start() -> direct.NewFile:
            self._make_folders(path.parent)
            return direct.NewFile(path, doing=doing, stall_s=self._stall_s, moved=count)

        def left() -> int:
            return part_bytes - written_bytes

        file = self._ask(start, doing, left)
        try:
            for part in parts:  # whose own errors are the caller's
                part_bytes += part.nbytes
                with self._explained(doing, left):
                    file.append(part)
            with self._explained(doing, left):
                file.finish()
            self._ask(lambda: fsync_folder(path.parent), doing)
        except Stalled:
            raise
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):  # a full disk needs the room of the part
                path.unlink()
            raise
        file.close()

    def put(self, name: str, data: bytes) -> None:
        def replace() -> None:
            path = self.root / name
            self._make_folders(path.parent)
            temporary = path.with_name(path.name + TEMPORARY)
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            fsync_folder(path.parent)

        self._ask(replace, f"writing {name} to {self.url}", lambda: len(data))

    def get(self, name: str) -> bytes:
        return self._ask((self.root / name).read_bytes, f"reading {name} from {self.url}")

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        doing = f"reading {name} from {self.url}"
        path, out = self.root / name, out.cast("B")
        starts = range(0, out.nbytes, BLOCK_BYTES)

        def read(position: int) -> int:
            block = out[position : position + BLOCK_BYTES]
            num_bytes = direct.read_at(path, start + position, block)
            if num_bytes < block.nbytes:
                raise StorageError(
                    f"{self.url}: {name} ends at byte {start + position + num_bytes:,}, byte "
                    f"{start + out.nbytes:,} was asked for; it was cut short, use another copy"
                )
            return num_bytes

        with self._explained(doing):
            move_all(
                starts,
                read,
                doing=doing,
                stall_s=self._stall_s,
                num_threads=min(direct.NUM_THREADS, len(starts)),
            )

    def remove(self, name: str) -> None:
        def take_away() -> None:
            path = self.root / name
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            except FileNotFoundError:
                return
            fsync_folder(path.parent)

        self._ask(take_away, f"removing {name} from {self.url}")

    def free_bytes(self) -> int | None:
        def look() -> int:
            for folder in (self.root, *self.root.absolute().parents):
                with contextlib.suppress(FileNotFoundError):
                    return shutil.disk_usage(folder).free
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)

        return self._ask(look, f"asking {self.url} for its free room")

    def _make_folders(self, folder: Path) -> None:
        """`folder` and what is missing above it, durable; only where the root's device is."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            if self._device is not None:
                self._refuse_another_device(path.parent)
            path.mkdir(exist_ok=True)
            fsync_folder(path.parent)
        if self.root.is_dir():
            self._refuse_another_device(self.root)

    def _refuse_another_device(self, path: Path) -> None:
        device = path.stat().st_dev
        if self._device is None:
            self._device = device
        elif device != self._device:
            raise StorageError(
                f"{self.url} was on another file system before: its mount is gone, or was "
                f"replaced. Mount it again. {_UNTOUCHED}"
            )

    def _ask(
        self, call: Callable[[], T], doing: str, needed_bytes: Callable[[], int] | None = None
    ) -> T:
        with self._explained(doing, needed_bytes):
            return answer(call, doing=doing, stall_s=self._stall_s)

    @contextlib.contextmanager
    def _explained(
        self, doing: str, needed_bytes: Callable[[], int] | None = None
    ) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(self._explain(error, doing, needed_bytes)) from error

    def _explain(self, error: OSError, doing: str, needed_bytes: Callable[[], int] | None) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f"{needed_bytes():,} bytes more are needed, " if needed_bytes else ""
            return (
                f"{doing}: the disk is full (or the quota is reached): {needed}"
                f"{self.free_bytes():,} are free; free space or lower checkpoint.keep_latest_k. "
                f"{_UNTOUCHED}"
            )
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            if not self.root.is_dir():
                return f"{doing}: the folder {self.url} is not there; mount it, or name another"
            return f"{doing}: there is no such file or folder"
        if isinstance(error, PermissionError):
            return f"{doing}: permission denied; give this user the right, or name another folder"
        return f"{doing}: {error.strerror or error}; see whether the disk is well. {_UNTOUCHED}"


def fsync_folder(folder: Path) -> None:
    """The names in it are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
