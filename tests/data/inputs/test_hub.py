"""Data sets by name, here of local folders: nothing of the network is asked."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale.data.inputs.documents import Kind, Skipped
from megascale.data.inputs.hub import HubDataset, named_dataset
from megascale.errors import DataError
from tests.data.inputs.reading import documents

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
_TEXTS: list[str | None] = [f"document {i} naïve" for i in range(700)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for i in range(2):
        table = pa.table({"text": _TEXTS[i * 350 : i * 350 + 350], "id": list(range(350))})
        pq.write_table(table, folder / f"train-{i:05}-of-00002.parquet", row_group_size=90)
    pq.write_table(pa.table({"text": ["held out", None]}), folder / "test-00000-of-00001.parquet")
    return folder


def test_rows_in_order(folder: Path) -> None:
    assert documents(f"hf:{folder}") == _TEXTS
    assert documents(f"hf:{folder}:default:train", f"hf:{folder}::test") == [
        *_TEXTS,
        "held out",
        Skipped(Kind.NULL, f"hf:{folder}::test, row 1"),
    ]


def test_names() -> None:
    assert named_dataset("hf:a/b", "x") == HubDataset("a/b", None, "train", "x")
    assert named_dataset("hf:a/b:en:test", "x") == HubDataset("a/b", "en", "test", "x")
    for name in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(DataError, match="is not a data set; the form is hf:NAME"):
            named_dataset(name, "x")


def test_what_is_not_there_is_told_before_anything_starts(folder: Path) -> None:
    with pytest.raises(DataError, match=r"Bad split: dev. Available splits: .*train.*the form is"):
        documents(f"hf:{folder}::dev")
    with pytest.raises(DataError, match=r"'en' not found. Available: \['default'\]"):
        documents(f"hf:{folder}:en")
    with pytest.raises(DataError, match="could not be read: FileNotFoundError"):
        documents(f"hf:{folder / 'absent'}")
    with pytest.raises(DataError, match=r"no column 'txt': .* did you mean 'text'\?"):
        documents(f"hf:{folder}", text_column="txt")


def test_a_saved_data_set_has_no_name(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"to be named without 'hf:': --input .*saved"):
        named_dataset(f"hf:{tmp_path / 'saved'}", "text")
