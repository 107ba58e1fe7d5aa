"""Line files as they are followed: whole lines once, whatever happens to the file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megascale.telemetry.path import line_files
from megascale.telemetry.path.line_files import LineFile, list_line_files
from megascale.telemetry.path.queue import CUT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank_00007.jsonl"


def read_all(file: LineFile, most_bytes: int = 1 << 20) -> list[tuple[int, bytes, int]]:
    found = []
    while (message := file.read(most_bytes)) is not None:
        found.append((message.offset, message.lines, message.passed_over))
    return found


def test_only_whole_lines_are_read(path: Path) -> None:
    file = LineFile(path, 7)
    with pytest.raises(FileNotFoundError):
        file.read()
    path.write_bytes(b"he")
    assert file.read() is None
    assert file.source is None
    path.write_bytes(b"head\none\ntw")
    assert read_all(file) == [(0, b"head\none\n", 0)]
    path.write_bytes(b"head\none\ntwo\n")
    assert read_all(file) == [(9, b"two\n", 0)]
    assert file.position == 13


def test_messages_are_small_and_a_long_line_is_whole(path: Path) -> None:
    long = b"x" * 300 + b"\n"
    path.write_bytes(b"head\n" + b"one\n" * 3 + long + b"end\n")
    found = read_all(LineFile(path, 7), most_bytes=10)
    assert b"".join(lines for _, lines, _ in found) == path.read_bytes()
    assert [len(lines) for _, lines, _ in found] == [9, 8, 301, 4]


def test_a_line_without_end_is_passed_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "LONGEST_LINE_BYTES", 64)
    monkeypatch.setattr(line_files, "MOST_BYTES", 16)
    file = LineFile(path, 7)
    path.write_bytes(b"head\n" + b"x" * 90)
    assert read_all(file, 16) == [(0, b"head\n", 0)]
    with path.open("ab") as out:
        out.write(b"x" * 100)
    assert read_all(file, 16) == []
    with path.open("ab") as out:
        out.write(b"x\nnext\n")
    assert read_all(file, 16) == [(5, b"", 192), (197, b"next\n", 0)]


def test_a_replaced_file_is_another_source(path: Path) -> None:
    file = LineFile(path, 7)
    path.write_bytes(b"head 1\none\n")
    read_all(file)
    first = file.source
    path.unlink()
    path.write_bytes(b"hea")
    assert read_all(file) == []
    path.write_bytes(b"head 2\ntwo\n")
    assert read_all(file) == [(0, b"head 2\ntwo\n", 0)]
    assert file.source != first
    path.write_bytes(b"head 3, in place\nthree\n")
    assert read_all(file) == [(0, b"head 3, in place\nthree\n", 0)]


def test_a_copy_is_the_same_source(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"head 1\none\n")
    (tmp_path / "copy").mkdir()
    copy = Path(shutil.copy(path, tmp_path / "copy"))
    assert LineFile(copy, 7).identify() == LineFile(path, 7).identify()


def test_a_cut_file_goes_on_from_its_new_end_and_positions_grow(path: Path) -> None:
    file = LineFile(path, 7)
    path.write_bytes(b"head\none\ntwo\nthree\n")
    read_all(file)
    os.truncate(path, 11)  # inside "two"
    assert read_all(file) == []
    with path.open("ab") as out:
        out.write(b"\nfour\n")
    assert read_all(file) == [(CUT + 9, b"tw\nfour\n", 0)]
    again = LineFile(path, 7)
    again.identify()
    again.go_to(file.position)
    assert read_all(again) == []
    with path.open("ab") as out:
        out.write(b"five\n")
    assert read_all(again) == [(CUT + 17, b"five\n", 0)]


def test_another_file_that_begins_alike_is_read_anew(path: Path) -> None:
    file = LineFile(path, 7)
    path.write_bytes(b"head\none\n")
    read_all(file)
    path.write_bytes(b"head\nsomething\n")
    assert read_all(file) == [(CUT, b"head\nsomething\n", 0)]


def test_another_file_that_has_grown_past_the_old_one(path: Path) -> None:
    file = LineFile(path, 7)
    path.write_bytes(b"head 1\none\n")
    read_all(file)
    first = file.source
    path.write_bytes(b"head 2\nsomething\n")
    assert read_all(file) == [(0, b"head 2\nsomething\n", 0)]
    assert file.source != first


def test_which_files_there_are(tmp_path: Path) -> None:
    assert list_line_files(tmp_path) == {}
    folder = tmp_path / "telemetry"
    (folder / "store").mkdir(parents=True)
    for name in ("rank_00003.jsonl", "rank_12345678.jsonl", "node_a.jsonl", "x.json"):
        (folder / name).touch()
    assert list_line_files(tmp_path) == {
        "node_a.jsonl": -1,
        "rank_00003.jsonl": 3,
        "rank_12345678.jsonl": 12345678,
    }
