"""What is damaged is skipped by rule and counted, or refused where asked; nothing good is lost."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale.data import sources
from megascale.data.indexed import IndexedTokens
from megascale.data.prepare import Progress, prepare, prepare_with_progress
from megascale.data.prepared import Meta, open_prepared
from megascale.data.tokenizer import load_tokenizer, train_bpe
from megascale.errors import DataError
from tests.data.inputs.reading import break_row_group

_TEXTS = [f"document {i}: some words, some more words\n" * (i % 4 + 1) for i in range(60)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    train_bpe(_TEXTS, 300).save(folder)
    return folder


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """All kinds of damage beside 60 - 10 - some good documents: a Parquet file with a broken row
    group, a null and a row that is not UTF-8, an empty document, lines that are cut short."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    raw = [text.encode() for text in _TEXTS[:40]]
    values = pa.array([*raw, None, b"na\xefve", b""]).view(pa.string())
    path = folder / "a.parquet"
    pq.write_table(
        pa.table({"text": values}), path, row_group_size=10, write_page_checksum=True,
        write_statistics=False,
    )  # fmt: skip
    break_row_group(path, 1)
    packed = gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in _TEXTS[40:]).encode())
    (folder / "b.jsonl.gz").write_bytes(packed[:-9])
    return folder


def _stored(output: Path) -> list[str]:
    tokenizer, file = load_tokenizer(output), IndexedTokens(output / "train")
    return [tokenizer.decode(file.document(i)[:-1].tolist()) for i in range(file.num_documents)]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_is_counted_and_the_rest_is_kept(
    damaged: Path,
    tokenizer: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    monkeypatch.setattr(sources, "_SEGMENT_BYTES", 500)
    output = tmp_path / "out"
    meta = prepare([str(damaged)], str(tokenizer), output, workers=workers, validation_fraction=0.0)
    kept = _stored(output)
    assert kept[:30] == _TEXTS[:10] + _TEXTS[20:40]
    assert kept[30:] == _TEXTS[40 : 40 + len(kept) - 30]
    assert (meta.skipped_row_groups, meta.skipped_file_ends) == (1, 1)
    assert (meta.skipped_null, meta.skipped_undecodable, meta.skipped_empty) == (1, 1, 1)
    assert "a.parquet, row group 1: " in caplog.text
    assert "b.jsonl.gz at line " in caplog.text
    assert open_prepared(output).meta == meta


def test_strict_refuses_each(tmp_path: Path, damaged: Path, tokenizer: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "null.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    for name, message in (
        (damaged / "a.parquet", "row group 1: .*: a broken row group; repair it or"),
        (damaged / "b.jsonl.gz", "cannot be read any further; repair it or"),
        (tmp_path / "latin1.txt", r"latin1\.txt: not UTF-8; .* without --strict"),
        (tmp_path / "null.jsonl", r"null\.jsonl at byte 14: no text; repair it or"),
    ):
        with pytest.raises(DataError, match=message):
            prepare([str(name)], str(tokenizer), tmp_path / "o", workers=1, strict=True)
        assert not list(tmp_path.glob("*partial*"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "full.txt").write_text("some words")
    meta = prepare(
        [str(tmp_path / "empty.txt"), str(tmp_path / "full.txt")], str(tokenizer), tmp_path / "o",
        workers=1, validation_fraction=0.0, strict=True,
    )  # fmt: skip
    assert meta.skipped_empty == 1
    assert meta.command.endswith("--strict")


def test_the_summary_tells_what_was_skipped(
    damaged: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_with_progress([str(damaged)], str(tokenizer), tmp_path / "o", workers=1)
    printed = capsys.readouterr().out
    assert "skipped: 1 empty, 1 not UTF-8, 1 null\n" in printed
    assert "broken: 1 row groups, the ends of 1 files\n" in printed


def test_a_vocabulary_is_learnt_from_streams_too(damaged: Path, tmp_path: Path) -> None:
    steps: list[Progress] = []
    prepare(
        [str(damaged)], "train:BPE:290", tmp_path / "o", workers=1, validation_fraction=0.2,
        progress=steps.append,
    )  # fmt: skip
    last = {step.phase: step for step in steps}
    assert all(step.done_bytes == step.total_bytes > 0 for step in last.values())
    again = prepare(
        [str(damaged)], "train:BPE:290", tmp_path / "p", workers=2, validation_fraction=0.2
    )
    assert again.tokenizer_sha256 == Meta.read(tmp_path / "o").tokenizer_sha256


def test_an_input_that_vanishes_meanwhile(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        lines = (json.dumps({"text": text}) + "\n" for text in _TEXTS)
        (tmp_path / name).write_text("".join(lines) * 400)  # more than a task

    def remove(step: Progress) -> None:
        (tmp_path / "b.jsonl").unlink(missing_ok=True)

    with pytest.raises(DataError, match=r"b\.jsonl vanished while it was being read; put it back"):
        prepare(
            [str(tmp_path / "*.jsonl")], str(tokenizer), tmp_path / "o", workers=1, progress=remove
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokenizer"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=64k tmpfs '{disk}'"
    if subprocess.run(mount, shell=True, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(_TEXTS) * 60)
    with pytest.raises(DataError, match="No space left on device; nothing was left behind"):
        prepare([str(tmp_path / "a.txt")], str(tokenizer), small_disk / "o", workers=1)
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_of_more_than_a_word(tokenizer: Path, tmp_path: Path, seed: int) -> None:
    with pytest.raises(DataError, match=rf"seed {seed} is not in \[0, 2\^64\)"):
        prepare(["stdlib"], str(tokenizer), tmp_path / "out", seed=seed)


def test_an_output_that_no_disk_can_name(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"could not prepare .*File name too long"):
        prepare(["stdlib"], str(tokenizer), tmp_path / ("x" * 300))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_it_is_asked_to_end(
    tokenizer: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    def ask(_step: Progress) -> None:
        os.kill(os.getpid(), signum)

    def run() -> None:
        text = str(tmp_path / "a.jsonl")
        prepare([text], str(tokenizer), tmp_path / "o", workers=1, progress=ask)

    lines = (json.dumps({"text": text}) + "\n" for text in _TEXTS)
    (tmp_path / "a.jsonl").write_text("".join(lines))
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + signum
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokenizer"]
    assert signal.getsignal(signum) == before
    signal.signal(signum, signal.SIG_IGN)
    try:
        run()
        assert signal.getsignal(signum) == signal.SIG_IGN
    finally:
        signal.signal(signum, before)
    assert Meta.read(tmp_path / "o").splits["train"].documents > 0
