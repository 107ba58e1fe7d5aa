"""Remote storages in trouble, and S3 in parts."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megascale.errors import ConfigError, MissingExtraError, StorageError
from megascale.storage import FileJob, FileWriter, multipart, open_storage
from tests.storage.contract import content
from tests.storage.s3_server import S3Server, s3_server

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def test_a_protocol_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'s4'.*give a folder, or one of .*s3"):
        open_storage("s4://bucket/prefix")
    with pytest.raises(ConfigError, match="without a name"):
        open_storage("")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> Any:
        raise ImportError(f"the library of {protocol}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(MissingExtraError, match=r"s3fs is not installed.*megascale\[s3\]"):
        open_storage("s3://bucket")
    with pytest.raises(MissingExtraError, match=r"gs:// needs .*the library of gs"):
        open_storage("gs://bucket")


def test_hdfs_without_hadoop_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.setenv(name, "/nowhere")
    with pytest.raises(StorageError, match=r"opening hdfs://127.0.0.1:1/x: .*webhdfs://") as caught:
        open_storage("hdfs://127.0.0.1:1/x")
    assert "\n" not in str(caught.value)


def test_a_bucket_that_is_not_there(s3: S3Server) -> None:
    storage = open_storage("s3://no-such-bucket/prefix")
    with pytest.raises(StorageError, match=r"writing file to s3://no-such-bucket/prefix.*bucket"):
        storage.put("file", b"x")
    with pytest.raises(StorageError, match=r"writing file to s3://no-such-bucket/prefix.*bucket"):
        storage.write("file", [memoryview(b"x")])


def test_a_large_object_goes_in_parts_and_appears_whole(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "PART_BYTES", 5 << 20)  # S3's smallest
    bucket = s3.new_bucket()
    storage = open_storage(f"{bucket}/prefix")
    data = content(23_000_001)
    cuts = [0, 1, 3_000_000, 3_000_001, 9_000_000, 23_000_001]
    seen: list[int | None] = []

    def parts() -> Iterator[memoryview]:
        for start, stop in zip(cuts, cuts[1:], strict=False):  # noqa: RUF007
            seen.append(storage.size("small-parts"))
            yield memoryview(data)[start:stop]

    moved: list[int] = []
    storage.write("small-parts", parts(), moved.append)
    storage.write("one-part", [memoryview(data)], moved.append)
    assert seen == [None] * 5
    assert storage.get("small-parts") == data
    assert storage.get("one-part") == data
    assert sum(moved) == 2 * len(data)
    assert len(moved) > 8  # in parts


def test_an_upload_that_fails_leaves_no_parts_behind(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "PART_BYTES", 5 << 20)
    bucket = s3.new_bucket()
    storage = open_storage(bucket)

    def parts() -> Iterator[memoryview]:
        yield memoryview(content(21 << 20))
        raise ValueError("the device is gone")

    with pytest.raises(ValueError, match="device is gone"):
        storage.write("file", parts())
    monkeypatch.setattr(multipart, "MAX_PARTS", 4)
    with pytest.raises(StorageError, match=r"4 parts of 5,242,880 bytes.*save from more ranks"):
        storage.write("file", [memoryview(content(21 << 20))])
    system = fsspec.filesystem("s3", use_listings_cache=False)
    assert system.list_multipart_uploads(bucket.removeprefix("s3://")) == []
    assert storage.names() == []


def test_of_two_that_claim_at_once_one_gets_it(s3: S3Server) -> None:
    url = s3.new_bucket()
    storages = [open_storage(url) for _ in range(4)]
    got: list[bool] = []
    threads = [
        threading.Thread(target=lambda s=storage: got.append(s.claim("step-1")))
        for storage in storages
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False, False, False, True]


def test_a_server_that_is_not_there_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        storage = open_storage("s3://bucket/alone", stall_s=1.5)
        began_s = time.monotonic()
        with pytest.raises(StorageError, match="reading file of s3://bucket/alone"):
            storage.get("file")
        assert time.monotonic() - began_s < 6


def test_a_server_that_stops_answering_is_a_stall() -> None:
    with s3_server() as server:
        storage = open_storage(server.new_bucket(), stall_s=1.0)
        storage.put("file", b"x")
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(StorageError, match=r"reading file of .*no progress for 1 s"):
            storage.get("file")
        os.kill(server.pid, signal.SIGCONT)


def test_another_process_writes_to_s3_and_copies_both_ways(s3: S3Server, tmp_path: Path) -> None:
    bucket = s3.new_bucket()
    header, values = content(4096), content((16 << 20) + 999, seed=1)
    descriptor = os.memfd_create("slot")
    os.write(descriptor, values)
    slot = f"/proc/{os.getpid()}/fd/{descriptor}"
    with FileWriter(stall_s=20.0) as writer:
        written = writer.write(FileJob(bucket, "step-1/rank-0", header, slot, 0, len(values)))
        down = writer.copy_file(bucket, str(tmp_path), "step-1/rank-0", header_bytes=4096)
        up = writer.copy_file(str(tmp_path), f"{bucket}/up", "step-1/rank-0", header_bytes=4096)
    os.close(descriptor)
    assert (tmp_path / "step-1" / "rank-0").read_bytes() == header + values
    assert open_storage(f"{bucket}/up").get("step-1/rank-0") == header + values
    for copied in (down, up):
        assert (copied.header_sha256, copied.blocks) == (written.header_sha256, written.blocks)


def test_a_forked_process_reaches_s3_by_itself(s3: S3Server) -> None:
    """Connections and threads of the parent are not there, or not its own."""
    storage = open_storage(s3.new_bucket())
    storage.put("file", b"of the parent")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            storage.put("other", storage.get("file") + b", read by the child")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert storage.get("other") == b"of the parent, read by the child"
