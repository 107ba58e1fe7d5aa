"""Compressed lines of JSON read as the lines would; a file cut short is kept up to there."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pytest

from megascale.data import sources
from megascale.data.inputs.documents import Kind, Skipped
from megascale.errors import DataError
from tests.data.inputs.reading import documents, kinds

_RANDOM = random.Random(1)
_TEXTS = [f"document {i} é " + str(_RANDOM.random()) * (i % 9) for i in range(2000)]


def _lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _write(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    else:
        packed = pa.BufferOutputStream()
        with pa.CompressedOutputStream(packed, "zstd") as file:
            file.write(content)
        path.write_bytes(packed.getvalue())
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json.gz"])
def test_reads_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", 1000)
    assert documents(_write(tmp_path / name, _lines(_TEXTS))) == _TEXTS


def test_files_end_to_end_are_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(_lines(_TEXTS[:9])) + gzip.compress(_lines(_TEXTS[9:])))
    assert documents(path) == _TEXTS


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_cut_short_is_kept_up_to_there(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / name, _lines(_TEXTS))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    *texts, last = documents(path)
    assert isinstance(last, Skipped)
    assert last.kind == Kind.FILE_END
    assert last.where.startswith(f"{path} at line {len(texts) + 1}: ")
    assert 800 < len(texts) < 2000
    assert texts == _TEXTS[: len(texts)]


@pytest.mark.parametrize("place", ["its checksum", "its text"])
def test_a_file_that_changed_inside_is_refused(tmp_path: Path, place: str) -> None:
    path = _write(tmp_path / "a.jsonl.gz", _lines(_TEXTS))
    content = bytearray(path.read_bytes())
    content[-8 if place == "its checksum" else len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz at line \d+: "):
        documents(path)


def test_nulls_undecodable_lines_and_keys(tmp_path: Path) -> None:
    lines = b'{"text": "a"}\n{"text": null}\n{"text": "na\xefve"}\n\n{"text": "b"}\n'
    for name, place in (("a.jsonl.gz", "line 2"), ("a.jsonl", "byte 14")):
        path = tmp_path / name
        path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
        read = documents(path)
        assert kinds(read) == [Kind.NULL, Kind.UNDECODABLE]
        assert read[1] == Skipped(Kind.NULL, f"{path} at {place}")
        assert [text for text in read if isinstance(text, str)] == ["a", "b"]
        with pytest.raises(DataError, match=r"string \"txt\", .* did you mean 'text'\?"):
            documents(path, text_column="txt")


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").write_bytes(b"")
    with pytest.raises(DataError, match=r"\.xz is no compression that is read; \.gz and \.zst are"):
        documents(tmp_path / "a.jsonl.xz")
