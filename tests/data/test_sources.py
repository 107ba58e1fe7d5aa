"""Every document is read once and in order, however the files are cut into segments."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from megascale.data import sources
from megascale.data.inputs import text
from megascale.data.inputs.documents import Skipped
from megascale.data.sources import find_sources, list_inputs
from megascale.errors import DataError


def _documents(files: list[Path]) -> list[str | None]:
    tasks = find_sources([str(file) for file in files]).tasks()
    documents = [document for task in tasks for part in task for document in part.read()]
    return [None if isinstance(d, Skipped) else str(d) for d in documents]


def _write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in texts))
    return path


@pytest.mark.parametrize("segment_bytes", [1, 7, 64, 1000])
def test_jsonl_is_the_same_in_any_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    texts = [f"document {i} " + "é\n" * (i % 9) for i in range(40)]
    path = _write_jsonl(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", segment_bytes)
    assert _documents([path]) == texts


def test_jsonl_without_a_last_newline_and_with_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n  \n{"text": ""}\n{"text": "b"}')
    assert _documents([path]) == ["a", "", "b"]


@pytest.mark.parametrize("segment_bytes", [50, 333, 5000])
def test_large_text_is_cut_at_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    lines = [f"line {i} ü\n" for i in range(1000)]
    path = tmp_path / "book.txt"
    path.write_text("".join(lines))
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(text, "_PIECE_BYTES", 100)
    documents = _documents([path])
    assert "".join(filter(None, documents)) == "".join(lines)
    assert len(documents) > 50
    assert all(d and d.endswith("\n") for d in documents)


def test_a_file_of_one_segment_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x\r\ny\n" * 1000)
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe broken")
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    assert _documents(files) == ["x\r\ny\n" * 1000, "", None]


def test_half_a_surrogate_pair_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud800"}\n{"text": "\\ud83d\\ude00"}\n')
    assert _documents([path]) == [None, "\N{GRINNING FACE}"]


def test_files_of_folders_globs_and_names_in_order_once(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b/.hidden", "b/.git/x", "c[1].txt", "a.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    named = list_inputs([str(tmp_path / "b"), str(tmp_path / "*.txt"), str(tmp_path / "a.txt")])
    assert [str(Path(p).relative_to(tmp_path)) for p in named] == [
        "b/1.txt",
        "b/2.txt",
        "a.txt",
        "c[1].txt",
    ]
    assert list_inputs([str(tmp_path / "c[1].txt")]) == [tmp_path / "c[1].txt"]


def test_the_standard_library_without_its_tests() -> None:
    files = [Path(path) for path in list_inputs(["stdlib"])]
    assert 300 < len(files) < 2000
    assert any(path.parts[-2:] == ("json", "decoder.py") for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)


def test_names_without_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent.txt", "*.nothing", "empty"):
        with pytest.raises(DataError, match="matches no file"):
            list_inputs([str(tmp_path / name)])
    with pytest.raises(DataError, match="no input"):
        list_inputs([])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "at byte 14: not a line of JSON"),
        ('{"txt": "a"}', 'at byte 14: expected an object with a string "text", got'),
        ('{"text": 3}', 'expected an object with a string "text"'),
        ("[1]", 'expected an object with a string "text"'),
        (
            '{"text": "a", "id": %s}' % ("1" * 5000),
            "at byte 14: not a line of JSON that can be read",
        ),
        ('{"text": "a", "tree": %s' % ("[" * 200_000), "not a line of JSON that can be read"),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        _documents([path])


def test_a_name_in_capitals_is_the_same_kind_of_file(tmp_path: Path) -> None:
    lines = '{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / "A.JSONL").write_text(lines)
    (tmp_path / "B.Jsonl.GZ").write_bytes(gzip.compress(lines.encode()))
    assert _documents([tmp_path / "A.JSONL", tmp_path / "B.Jsonl.GZ"]) == ["a", "b", "a", "b"]


def test_compressed_text_is_refused_and_not_taken_for_text(tmp_path: Path) -> None:
    for name in ("a.txt.gz", "a.zst"):
        (tmp_path / name).write_bytes(gzip.compress(b"text"))
        with pytest.raises(DataError, match=r"those of lines of JSON are read .*unpack it"):
            find_sources([str(tmp_path / name)])


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (str(tmp_path / "pipe.jsonl"), "/dev/null"):
        with pytest.raises(
            DataError, match=r"is no file but a pipe or a device.*write it to a file"
        ):
            find_sources([path])
