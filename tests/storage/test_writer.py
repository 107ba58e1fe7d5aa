"""The process that writes files: what it writes, what it hashes, and how it ends."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.errors import StorageError
from megascale.storage import BLOCK_BYTES, FileJob, FileWriter, open_storage
from megascale.storage import writer as writer_module
from tests.storage.contract import content

START = 8192
HEADER = content(4096, seed=1)


@pytest.fixture(scope="module")
def values() -> bytes:
    return content(2 * BLOCK_BYTES + 777)


@pytest.fixture(scope="module")
def slot(values: bytes) -> Iterator[str]:
    """A memory file of this process, as a trainer's slot is."""
    descriptor = os.memfd_create("slot")
    os.write(descriptor, b"s" * START + values)
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


@pytest.fixture
def writer() -> Iterator[FileWriter]:
    with FileWriter(stall_s=20.0) as started:
        yield started


def job(root: Path, slot: str, num_bytes: int, name: str = "step-1/rank-0") -> FileJob:
    return FileJob(str(root), name, HEADER, slot, START, num_bytes)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, BLOCK_BYTES, 2 * BLOCK_BYTES + 777])
def test_a_file_is_its_header_and_its_range_of_the_slot(
    tmp_path: Path, slot: str, values: bytes, writer: FileWriter, num_bytes: int
) -> None:
    moved: list[int] = []
    written = writer.write(job(tmp_path, slot, num_bytes), moved.append)
    assert (tmp_path / "step-1" / "rank-0").read_bytes() == HEADER + values[:num_bytes]
    assert sum(moved) == written.num_bytes == len(HEADER) + num_bytes
    assert written.header_sha256 == sha256(HEADER)
    assert written.blocks == tuple(
        sha256(values[start : min(start + BLOCK_BYTES, num_bytes)])
        for start in range(0, num_bytes, BLOCK_BYTES)
    )
    assert 0 < written.seconds < 20


def test_a_file_is_copied_with_the_hashes_of_what_was_read(
    tmp_path: Path, values: bytes, writer: FileWriter
) -> None:
    source, target = open_storage(tmp_path / "source"), tmp_path / "target"
    source.write("folder/file", [memoryview(HEADER), memoryview(values)])
    moved: list[int] = []
    written = writer.copy_file(
        source.url, str(target), "folder/file", moved.append, header_bytes=len(HEADER)
    )
    assert (target / "folder" / "file").read_bytes() == HEADER + values
    assert sum(moved) == written.num_bytes == len(HEADER) + len(values)
    assert written.header_sha256 == sha256(HEADER)
    starts = range(0, len(values), BLOCK_BYTES)
    assert written.blocks == tuple(sha256(values[i : i + BLOCK_BYTES]) for i in starts)
    with pytest.raises(StorageError, match="has no folder/other; nothing was copied"):
        writer.copy_file(source.url, str(target), "folder/other")


def test_a_header_larger_than_a_pipe_arrives(tmp_path: Path, slot: str, writer: FileWriter) -> None:
    header = content(3 << 20)
    written = writer.write(FileJob(str(tmp_path), "file", header, slot, START, 5))
    assert (tmp_path / "file").read_bytes()[: len(header)] == header
    assert written.header_sha256 == sha256(header)


def test_the_process_has_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, megascale.storage.writer_process; "
        "sys.exit(int(bool({'torch', 'numpy', 'fsspec'} & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_what_fails_there_is_told_here_and_the_next_job_is_done(
    tmp_path: Path, slot: str, values: bytes, writer: FileWriter
) -> None:
    pid = writer.pid
    (tmp_path / "taken").write_bytes(b"a file, no folder")
    with pytest.raises(StorageError, match=r"writing step-1/rank-0 to .*taken"):
        writer.write(job(tmp_path / "taken", slot, 10))
    with pytest.raises(StorageError, match="has 33,563,401 bytes, 99,999,999 are to be written"):
        writer.write(job(tmp_path, slot, 99_999_999 - START))
    with pytest.raises(StorageError, match="No such file"):
        writer.write(job(tmp_path, "/dev/shm/megascale-no-such-slot", 10))
    with pytest.raises(StorageError, match="memory://x lives in one process"):
        writer.write(FileJob("memory://x", "file", HEADER, slot, START, 10))
    assert writer.write(job(tmp_path, slot, 10)).num_bytes == len(HEADER) + 10
    assert writer.pid == pid
    assert len(values) + START == 33_563_401


def test_a_disk_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, writer: FileWriter
) -> None:
    free_bytes = open_storage(tmp_path).free_bytes()
    assert free_bytes is not None
    slot = tmp_path / "sparse"
    slot.touch()
    num_bytes = 4 * free_bytes
    os.truncate(slot, START + num_bytes)  # takes no room
    wanted = f"{len(HEADER) + num_bytes:,} bytes are needed, .* are free.*Nothing was written"
    with pytest.raises(StorageError, match=wanted):
        writer.write(job(tmp_path, str(slot), num_bytes))
    assert not (tmp_path / "step-1").exists()


def test_a_process_that_was_killed_is_told_and_followed_by_a_new_one(
    tmp_path: Path, slot: str
) -> None:
    os.mkfifo(tmp_path / "rank-0")  # keeps it at its job
    with FileWriter(stall_s=20.0) as writer:
        pid = writer.pid
        assert pid is not None
        threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()
        with pytest.raises(
            StorageError, match=r"ended by SIGKILL.*older checkpoints are untouched"
        ):
            writer.write(job(tmp_path, slot, 10, "rank-0"))
        assert writer.write(job(tmp_path, slot, 10)).num_bytes == len(HEADER) + 10
        assert writer.pid != pid


def test_a_stall_is_told_by_the_process_itself(tmp_path: Path, slot: str) -> None:
    os.mkfifo(tmp_path / "rank-0")
    with FileWriter(stall_s=0.3) as writer:
        with pytest.raises(StorageError, match=r"rank-0 to .*no progress for 0.3 s"):
            writer.write(job(tmp_path, slot, 10, "rank-0"))
        assert writer.write(job(tmp_path, slot, 10)).num_bytes == len(HEADER) + 10


def test_a_process_that_says_nothing_is_replaced(
    tmp_path: Path, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_GRACE_S", 0.2)
    with FileWriter(stall_s=5.0) as writer:
        assert writer.write(job(tmp_path, slot, 10)).num_bytes == len(HEADER) + 10
        writer._stall_s = 0.2
        pid = writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(StorageError, match=r"rank-0 to .*no progress for 0.4 s"):
            writer.write(job(tmp_path, slot, 10))
        writer._stall_s = 20.0
        assert writer.write(job(tmp_path, slot, 10)).num_bytes == len(HEADER) + 10
        assert writer.pid != pid


def test_closing_ends_the_process_even_at_its_job(tmp_path: Path, slot: str) -> None:
    os.mkfifo(tmp_path / "rank-0")
    writer = FileWriter(stall_s=20.0)
    writer.start()
    pid = writer.pid
    threading.Timer(0.3, writer.close).start()
    with pytest.raises(StorageError, match="as it was closed"):
        writer.write(job(tmp_path, slot, 10, "rank-0"))
    assert pid is not None
    assert not _is_alive(pid)
    with pytest.raises(StorageError, match="was closed"):
        writer.write(job(tmp_path, slot, 10))


def test_an_error_of_whoever_listens_does_not_spoil_the_next_job(
    tmp_path: Path, slot: str, writer: FileWriter
) -> None:
    """What the process still had to say about the first is not taken for the second's."""

    def listen(num_bytes: int) -> None:
        raise ValueError("the listener")

    with pytest.raises(ValueError, match="the listener"):
        writer.write(job(tmp_path, slot, 2 * BLOCK_BYTES), listen)
    assert writer.write(job(tmp_path, slot, 10, "other")).num_bytes == len(HEADER) + 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_are_the_trainers(
    tmp_path: Path, slot: str, writer: FileWriter, number: signal.Signals
) -> None:
    writer.write(job(tmp_path, slot, 10))  # it has set itself up
    pid = writer.pid
    assert pid is not None
    os.kill(pid, number)
    assert writer.write(job(tmp_path, slot, 20)).num_bytes == len(HEADER) + 20
    assert writer.pid == pid


def test_it_dies_with_its_parent_though_a_fork_holds_its_pipes(tmp_path: Path) -> None:
    """And outlives the thread that started it."""
    program = f"""
import os, signal, threading, time
from megascale.storage import FileJob, FileWriter
writer = FileWriter(stall_s=60.0)
thread = threading.Thread(target=writer.start)
thread.start(); thread.join()
descriptor = os.memfd_create("slot")
os.write(descriptor, b"x" * 4096)
slot = f"/proc/{{os.getpid()}}/fd/{{descriptor}}"
writer.write(FileJob({str(tmp_path)!r}, "file", b"", slot, 0, 4096))
if (fork := os.fork()) == 0:
    time.sleep(60)
    os._exit(0)
print(writer.pid, fork, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        writer_pid, fork_pid = map(int, parent.stdout.readline().split())
    try:
        assert (tmp_path / "file").read_bytes() == b"x" * 4096
        end_s = time.monotonic() + 10
        while _is_alive(writer_pid) and time.monotonic() < end_s:
            time.sleep(0.02)
        assert not _is_alive(writer_pid)
    finally:
        os.kill(fork_pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_writer_whose_parent_is_gone_already_ends_without_a_word() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    program = f"from megascale.storage.writer_process import die_with; die_with({gone.pid})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")
