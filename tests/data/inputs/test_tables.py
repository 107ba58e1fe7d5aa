"""Parquet and Arrow give their rows in order, however they are cut; what is broken is left out."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from megascale.data import sources
from megascale.data.inputs import tables
from megascale.data.inputs.documents import Kind, Skipped, SourceFile
from megascale.errors import DataError
from tests.data.inputs.reading import break_row_group, documents, kinds

_TEXTS = [f"document {i} " + "naïve words " * (i % 9) for i in range(100)]


def _parquet(path: Path, texts: list[Any], rows: int = 10, kind: Any = None) -> Path:
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, kind)})
    pq.write_table(table, path, row_group_size=rows, write_page_checksum=True)
    return path


def _arrow(path: Path, texts: list[Any], rows: int = 10, of_file: bool = False) -> Path:
    table = pa.table({"text": texts})
    new = ipc.new_file if of_file else ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("large_group_bytes", [0, 16 << 20])
@pytest.mark.parametrize("batch_bytes", [1, 500, 1 << 20])
def test_parquet_in_any_cut(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    large_group_bytes: int,
    batch_bytes: int,
) -> None:
    monkeypatch.setattr(tables, "_LARGE_GROUP_BYTES", large_group_bytes)
    monkeypatch.setattr(tables, "_BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", 300)
    assert documents(_parquet(tmp_path / "a.parquet", _TEXTS, rows)) == _TEXTS


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_type_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    values = [text.encode() for text in _TEXTS] if kind == pa.binary() else _TEXTS
    assert documents(_parquet(tmp_path / "a.parquet", values, kind=kind)) == _TEXTS


@pytest.mark.parametrize("large_group_bytes", [0, 16 << 20])
def test_a_broken_row_group_is_left_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_group_bytes: int
) -> None:
    monkeypatch.setattr(tables, "_LARGE_GROUP_BYTES", large_group_bytes)
    monkeypatch.setattr(tables, "_BATCH_ROWS", 2)
    path = _parquet(tmp_path / "a.parquet", _TEXTS)
    break_row_group(path, 3)
    read = documents(path)
    assert [text for text in read if isinstance(text, str)] == _TEXTS[:30] + _TEXTS[40:]
    (skipped,) = (document for document in read if isinstance(document, Skipped))
    assert skipped.kind == Kind.ROW_GROUP
    assert skipped.where.startswith(f"{path}, row group 3: ")


def test_a_failing_disk_is_not_a_broken_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _parquet(tmp_path / "a.parquet", _TEXTS)
    tasks = list(sources.find_sources([str(path)]).tasks())

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tables, "_parquet", fail)
    with pytest.raises(OSError, match="Input/output error"):
        list(tasks[0][0].read())


def test_null_and_undecodable_rows_are_named(tmp_path: Path) -> None:
    raw = ["a", None, "b"]
    path = _parquet(tmp_path / "a.parquet", raw)
    assert documents(path) == ["a", Skipped(Kind.NULL, f"{path}, row group 0, row 1"), "b"]
    not_text = pa.array([b"a", b"na\xefve", b"b"]).view(pa.string())
    pq.write_table(pa.table({"text": not_text}), path)
    assert kinds(documents(path)) == [Kind.UNDECODABLE]
    assert documents(path)[2] == "b"


def test_no_such_column_names_the_nearest(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "a.parquet", _TEXTS)
    with pytest.raises(
        DataError, match=r"no column 'texts': there are 'id', 'text'; did you mean 'text'\?"
    ):
        documents(path, text_column="texts")
    with pytest.raises(DataError, match=r"has int64 in the column 'id', not text; .* are 'text'"):
        documents(path, text_column="id")
    arrow = _arrow(tmp_path / "a.arrow", _TEXTS)
    with pytest.raises(DataError, match=r"no column 'txt'.* did you mean 'text'"):
        documents(arrow, text_column="txt")


@pytest.mark.parametrize("kept", [0, 3, 200, -1])
def test_a_half_written_parquet_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = _parquet(tmp_path / "a.parquet", _TEXTS)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"a\.parquet is not a whole Parquet file .*; write it aga"):
        documents(path)


@pytest.mark.parametrize("of_file", [False, True])
def test_arrow_of_both_formats(tmp_path: Path, of_file: bool) -> None:
    path = _arrow(tmp_path / "a.arrow", _TEXTS, of_file=of_file)
    assert documents(path) == _TEXTS


def test_an_arrow_file_cut_short_is_kept_up_to_there(tmp_path: Path) -> None:
    path = _arrow(tmp_path / "a.arrow", _TEXTS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    read = documents(path)
    assert kinds(read) == [Kind.FILE_END]
    texts = [text for text in read if isinstance(text, str)]
    assert 40 <= len(texts) <= 80
    assert texts == _TEXTS[: len(texts)]
    path.write_bytes(b"nothing of Arrow")
    with pytest.raises(DataError, match=r"a\.arrow is not an Arrow file"):
        documents(path)


def test_a_saved_dataset_is_read_in_the_order_of_its_shards(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": _TEXTS}).save_to_disk(str(folder), num_shards=12)
    assert documents(folder) == _TEXTS
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    )
    both.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match=r"several splits; name one of: .*both/train, .*both/test"):
        documents(tmp_path / "both")
    assert documents(tmp_path / "both" / "train") == ["train"]
    next(folder.glob("data-00003-*")).unlink()
    with pytest.raises(DataError, match=r"saved lacks data-00003-of-00012\.arrow"):
        documents(folder)


def test_a_file_that_changes_or_vanishes_is_told(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "a.parquet", _TEXTS)
    tasks = list(sources.find_sources([str(path)]).tasks())
    _parquet(path, _TEXTS[:50])
    with pytest.raises(DataError, match=r"a\.parquet changed while it was being read"):
        list(tasks[0][0].read())
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet vanished while it was being read"):
        list(tasks[0][0].read())
    with pytest.raises(DataError, match="vanished"):
        SourceFile.of(path)


@pytest.mark.parametrize("text", ['{"_data', "{}", "[]", '{"_data_files": [1], "splits": 1}'])
@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_a_saved_dataset_with_a_damaged_description(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} is damaged .*name the \.arrow files beside it"):
        documents(tmp_path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(_TEXTS), pa.array(_TEXTS)], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has 2 columns 'text'"):
        documents(tmp_path / "a.parquet")
