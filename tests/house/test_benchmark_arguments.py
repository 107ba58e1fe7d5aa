"""A benchmark knows whether it can write its rows before it measures, not after."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.arguments import writable_file, writable_folder


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    rows = writable_file(str(tmp_path / "new" / "rows.jsonl"))
    assert rows.read_text() == ""
    assert writable_folder(str(tmp_path / "kept" / "events")).is_dir()


def test_rows_that_are_there_stay(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("one\n")
    assert writable_file(str(tmp_path / "rows.jsonl")).read_text() == "one\n"


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
        writable_file(str(tmp_path / "file" / "rows.jsonl"))
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be made"):
        writable_folder(str(tmp_path / "file" / "events"))


@pytest.mark.parametrize("file", sorted(Path("benchmarks").rglob("*.py")), ids=str)
def test_every_benchmark_asks_so(file: Path) -> None:
    text = file.read_text()
    for line in text.splitlines():
        if 'add_argument("--output"' in line and "check_output(" not in text:
            assert "type=writable_file" in line, f"{file}: {line.strip()}"
