"""What every storage keeps (`megascale/storage/interface.py`), as cases that take one.

`test_contract.py` runs them on each kind. Content is compared with what was written, byte by byte.
"""

from __future__ import annotations

import itertools
import mmap
import random
import time
from collections.abc import Callable, Iterator

import pytest

from megascale.errors import StorageError
from megascale.storage import BLOCK_BYTES, LocalFolder, Storage
from megascale.storage.remote import RemoteFolder

Case = Callable[[Storage], None]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def content(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def aligned(data: bytes) -> memoryview:
    buffer = mmap.mmap(-1, max(len(data), 1))
    buffer[: len(data)] = data
    return memoryview(buffer)[: len(data)]


def read(storage: Storage, name: str, start: int, num_bytes: int) -> bytes:
    out = bytearray(num_bytes)
    storage.read_into(name, start, memoryview(out))
    return bytes(out)


@case
def what_is_not_there_is_said_so(storage: Storage) -> None:
    assert storage.names() == []
    assert storage.names("step-00000001") == []
    assert storage.size("step-00000001/MARK") is None
    storage.remove("step-00000001")
    with pytest.raises(StorageError, match="MARK"):
        storage.get("step-00000001/MARK")
    with pytest.raises(StorageError, match="MARK"):
        read(storage, "step-00000001/MARK", 0, 1)


@case
def a_folder_is_claimed_once(storage: Storage) -> None:
    assert storage.claim("step-00000001")
    assert not storage.claim("step-00000001")
    assert storage.claim("step-00000001.1")
    assert storage.names() == ["step-00000001", "step-00000001.1"]
    assert storage.names("step-00000001") == []
    storage.remove("step-00000001")
    assert storage.names() == ["step-00000001.1"]
    assert storage.claim("step-00000001")


@case
def a_folder_with_files_is_not_claimed(storage: Storage) -> None:
    storage.put("step-00000001/file", b"x")
    assert not storage.claim("step-00000001")


@case
def a_small_file_is_put_got_replaced_and_removed(storage: Storage) -> None:
    storage.put("folder/file", b"old")
    storage.put("folder/other", b"")
    storage.put("folder/file", b"the new one")
    assert storage.get("folder/file") == b"the new one"
    assert storage.get("folder/other") == b""
    assert storage.names("folder") == ["file", "other"]
    assert storage.names() == ["folder"]
    assert (storage.size("folder/file"), storage.size("folder/other")) == (11, 0)
    assert storage.size("folder") is None
    storage.remove("folder/file")
    assert storage.names("folder") == ["other"]
    storage.remove("folder")
    assert storage.size("folder/other") is None
    assert storage.names() == []


@case
def a_name_that_begins_another_is_left_alone(storage: Storage) -> None:
    storage.put("step-1/file", b"1")
    storage.put("step-1.1/file", b"2")
    storage.remove("step-1")
    assert storage.names() == ["step-1.1"]
    assert storage.get("step-1.1/file") == b"2"


@case
def parts_of_any_size_make_one_file(storage: Storage) -> None:
    """Odd lengths, odd addresses, empty parts, a reused buffer."""
    data = content(700_001)
    cuts = [0, 0, 1, 4096, 4097, 4097, 300_000, 700_001]
    buffer = bytearray(700_001)

    def parts() -> Iterator[memoryview]:
        for start, stop in itertools.pairwise(cuts):
            buffer[: stop - start] = data[start:stop]
            yield memoryview(buffer)[: stop - start]

    moved: list[int] = []
    storage.write("folder/file", parts(), moved.append)
    assert storage.size("folder/file") == len(data)
    assert storage.get("folder/file") == data
    assert sum(moved) == len(data)


@case
def a_file_of_no_parts_is_empty(storage: Storage) -> None:
    storage.write("folder/file", [])
    assert storage.size("folder/file") == 0
    assert storage.get("folder/file") == b""


@case
def a_part_of_several_blocks_lies_in_order(storage: Storage) -> None:
    """Aligned behind an aligned header, as a file of state is; and one byte off."""
    data = content(2 * BLOCK_BYTES + 12_345)
    for header, part in ((b"h" * 8192, aligned(data)), (b"h", aligned(data)[1:])):
        moved: list[int] = []
        storage.write("file", [memoryview(header), part], moved.append)
        whole = header + bytes(part)
        assert sum(moved) == len(whole)
        assert storage.size("file") == len(whole)
        out = aligned(bytes(len(whole)))
        storage.read_into("file", 0, out)
        assert bytes(out) == whole


@case
def any_range_is_read(storage: Storage) -> None:
    data = content(100_001)
    storage.write("file", [memoryview(data)])
    ranges = [(0, 1), (4096, 8192), (4095, 4098), (99_999, 2), (8192, 91_809), (50, 0)]
    for start, num_bytes in ranges:
        assert read(storage, "file", start, num_bytes) == data[start : start + num_bytes]


@case
def reading_past_the_end_is_an_error(storage: Storage) -> None:
    storage.put("file", content(10_000))
    for start, num_bytes in ((0, 10_001), (4096, 8192), (10_000, 1), (20_480, 4096)):
        with pytest.raises(StorageError, match=r"file.*10,000|file.*cut short"):
            read(storage, "file", start, num_bytes)


@case
def writing_again_leaves_nothing_of_the_old(storage: Storage) -> None:
    storage.write("file", [memoryview(content(50_000))])
    storage.write("file", [memoryview(b"short")])
    assert storage.get("file") == b"short"


@case
def an_error_of_the_parts_is_the_callers(storage: Storage) -> None:
    """And what stood there before is not taken for the new file."""

    def parts() -> Iterator[memoryview]:
        yield memoryview(b"begun")
        raise ValueError("the device is gone")

    with pytest.raises(ValueError, match="device is gone"):
        storage.write("file", parts())
    assert storage.size("file") in (None, 5)


@case
def when_a_file_was_written_is_known(storage: Storage) -> None:
    assert isinstance(storage, (LocalFolder, RemoteFolder))
    assert storage.modified_s("folder/file") is None
    storage.put("folder/file", b"x")
    modified_s = storage.modified_s("folder/file")
    assert modified_s is not None
    assert abs(time.time() - modified_s) < 120
