"""Folders in trouble: full, gone, replaced, stalled, without O_DIRECT."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.errors import StorageError
from megascale.storage import BLOCK_BYTES, LocalFolder, direct
from tests.storage.contract import CASES, Case, aligned, content


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_contract_without_o_direct(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0)
    case(LocalFolder(tmp_path / "root"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_contract_on_tmpfs(case: Case) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        case(LocalFolder(Path(folder) / "root"))


def test_a_disk_that_refuses_o_direct_late_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems take the flag and refuse every write."""
    pwrite, flags = os.pwrite, []

    def refuse(descriptor: int, view: memoryview, offset: int) -> int:
        import fcntl

        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if flags[-1]:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return pwrite(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    data = content(BLOCK_BYTES + 5000)
    LocalFolder(tmp_path).write("file", [aligned(data)])
    assert (tmp_path / "file").read_bytes() == data
    assert flags[0]
    assert not flags[-1]


def test_a_full_disk_is_said_with_its_numbers_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, view: memoryview, offset: int) -> int:
        if offset >= BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, view)

    monkeypatch.setattr(direct, "NUM_THREADS", 1)
    monkeypatch.setattr(os, "pwrite", full)
    storage = LocalFolder(tmp_path)
    storage.put("older", b"good")
    data = aligned(bytes(3 * BLOCK_BYTES))
    needed = f"{2 * BLOCK_BYTES:,} bytes more are needed"
    with pytest.raises(StorageError, match=f"disk is full.*{needed}.*free.*older checkpoints"):
        storage.write("folder/file", [data])
    assert storage.names("folder") == []
    assert storage.get("older") == b"good"


def test_a_device_that_is_full_says_so_by_itself(tmp_path: Path) -> None:
    """The kernel's own ENOSPC."""
    storage = LocalFolder(tmp_path)
    storage.put("older", b"good")
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"disk is full.*5,000 bytes more are needed"):
        storage.write("file", [memoryview(bytes(5000))])
    assert storage.names() == ["older"]


def test_a_small_file_on_a_full_disk_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalFolder(tmp_path)
    storage.put("file", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"disk is full.*3 bytes more are needed"):
        storage.put("file", b"new")
    monkeypatch.undo()
    assert storage.get("file") == b"old"
    assert storage.names() == ["file"]


def test_a_folder_that_goes_while_it_is_written(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path / "root")
    storage.claim("folder")

    def parts() -> Iterator[memoryview]:
        yield memoryview(b"first")
        (tmp_path / "root" / "folder" / "file").unlink()
        (tmp_path / "root" / "folder").rmdir()
        yield memoryview(b"second")

    with pytest.raises(StorageError, match=r"writing folder/file.*no such file or folder"):
        storage.write("folder/file", parts())


def test_a_mount_that_is_gone_is_not_filled_up_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        storage = LocalFolder(Path(mounted) / "root")
        assert storage.claim("step-00000001")
        assert storage.names() == ["step-00000001"]
        storage.root = tmp_path / "root"  # as if the mount point showed the disk below
        with pytest.raises(StorageError, match=r"another file system before.*Mount it again"):
            storage.claim("step-00000002")
        (tmp_path / "root").mkdir()
        for ask in (storage.names, lambda: storage.put("step-00000001/MARK", b"x")):
            with pytest.raises(StorageError, match="another file system before"):
                ask()
        assert not any((tmp_path / "root").iterdir())


def test_reading_that_stalls_is_given_up(tmp_path: Path) -> None:
    """A FIFO without a writer keeps whoever opens it for ever."""
    os.mkfifo(tmp_path / "file")
    storage = LocalFolder(tmp_path, stall_s=0.2)
    with pytest.raises(StorageError, match=r"reading file from .*no progress for 0.2 s"):
        storage.get("file")
    with pytest.raises(StorageError, match=r"reading file from .*no progress for 0.2 s"):
        storage.read_into("file", 0, memoryview(bytearray(1)))


def test_writing_that_stalls_is_given_up(tmp_path: Path) -> None:
    """A FIFO that nobody reads."""
    os.mkfifo(tmp_path / "file")
    with pytest.raises(StorageError, match=r"writing file to .*no progress for 0.2 s, after 0 b"):
        LocalFolder(tmp_path, stall_s=0.2).write("file", [memoryview(b"x")])


def test_a_stall_says_how_far_it_came_and_slow_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks at 0.1 s each are longer than 0.25 s, the fifth does not end."""
    pwrite, wake = os.pwrite, threading.Event()

    def slow(descriptor: int, view: memoryview, offset: int) -> int:
        wake.wait(0.1 if offset < 4 * BLOCK_BYTES else None)
        return pwrite(descriptor, view, offset)

    monkeypatch.setattr(direct, "NUM_THREADS", 1)
    monkeypatch.setattr(os, "pwrite", slow)
    storage = LocalFolder(tmp_path, stall_s=0.25)
    with pytest.raises(StorageError, match=f"for 0.25 s, after {4 * BLOCK_BYTES:,} bytes"):
        storage.write("file", [aligned(bytes(5 * BLOCK_BYTES))])
    wake.set()


def test_what_may_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"a file, no folder")
    storage = LocalFolder(tmp_path / "taken")
    with pytest.raises(StorageError, match="taken"):
        storage.claim("step-00000001")
    assert storage.names() == []
