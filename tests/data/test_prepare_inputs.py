"""The same documents make the same files, in whatever form they come and whoever reads them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale.data import sources
from megascale.data.inputs import tables
from megascale.data.prepare import prepare
from megascale.data.tokenizer import train_bpe

_TEXTS = [f"document {i}: some words, naïve ones\n" * (i % 5 + 1) for i in range(80)]
_FORMS = ["parquet", "parquet of small groups", "arrow", "saved", "gz", "zst", "hf", "tokens"]


def _write(folder: Path, form: str, tokenizer: Path) -> str:
    """The input to name."""
    folder.mkdir()
    table = pa.table({"text": _TEXTS})
    lines = "".join(json.dumps({"text": text}) + "\n" for text in _TEXTS).encode()
    if form == "jsonl":
        (folder / "a.jsonl").write_bytes(lines)
    elif form.startswith("parquet"):
        pq.write_table(table, folder / "a.parquet", row_group_size=9 if "small" in form else 99)
    elif form == "arrow":
        with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=11)
    elif form == "saved":
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        datasets.Dataset(table).save_to_disk(str(folder), num_shards=3)
    elif form == "gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    elif form == "zst":
        packed = pa.BufferOutputStream()
        with pa.CompressedOutputStream(packed, "zstd") as file:
            file.write(lines)
        (folder / "a.jsonl.zst").write_bytes(packed.getvalue())
    elif form == "hf":
        pytest.importorskip("datasets")
        pq.write_table(table.slice(0, 30), folder / "train-00000-of-00002.parquet")
        pq.write_table(table.slice(30), folder / "train-00001-of-00002.parquet")
        return f"hf:{folder}"
    else:  # as a preparation leaves them, so in its order too
        (folder.parent / "text.jsonl").write_bytes(lines)
        prepare(
            [str(folder.parent / "text.jsonl")], str(tokenizer), folder / "once", workers=1,
            validation_fraction=0.0,
        )  # fmt: skip
        return str(folder / "once" / "train")
    return str(folder)


def _files(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.iterdir() if path.suffix != ".json"}


@pytest.mark.parametrize("form", _FORMS)
def test_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    train_bpe(_TEXTS, 300).save(tokenizer)
    # which documents are held out differs where a document is its tokens: their hash is another
    fraction = 0.0 if form == "tokens" else 0.2
    plain = _write(tmp_path / "plain", "jsonl", tokenizer)
    name = _write(tmp_path / "form", form, tokenizer)
    prepare([plain], str(tokenizer), tmp_path / "p", workers=1, validation_fraction=fraction)
    expected = _files(tmp_path / "p")
    assert len(expected) == (2 if form == "tokens" else 4)
    prepare([name], str(tokenizer), tmp_path / "one", workers=1, validation_fraction=fraction)
    assert _files(tmp_path / "one") == expected
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", 300)
    monkeypatch.setattr(tables, "_LARGE_GROUP_BYTES", 300)
    workers = 2 if form in ("parquet of small groups", "gz") else 1  # part by part, and in order
    prepare([name], str(tokenizer), tmp_path / "two", workers=workers, validation_fraction=fraction)
    assert _files(tmp_path / "two") == expected
