"""Catching up: what readers store of a run by themselves."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from megascale.events import to_line
from megascale.telemetry.path.line_files import telemetry_folder
from megascale.telemetry.store import catch_up as module
from megascale.telemetry.store import writing
from megascale.telemetry.store.catch_up import catch_up
from megascale.telemetry.store.retention import deleted
from megascale.telemetry.store.segments import live_segments, store_folder
from megascale.telemetry.store.writing import StoreLock
from megascale.telemetry.writer import line_file
from tests.telemetry.path.writers import header, rows_of_files, rows_of_store, step_lines


def write(run_dir: Path, steps: range, ranks: int = 3) -> None:
    """Steps of ranks; the first of a call begins with a header."""
    telemetry_folder(run_dir).mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        with line_file(run_dir, rank).open("a") as file:
            file.write(to_line(header(rank, ranks)))
            file.writelines(step_lines(rank, step, spans=2) for step in steps)


def check(run_dir: Path, folder: Path | None = None) -> None:
    stored = rows_of_store(folder or store_folder(run_dir))
    assert stored == rows_of_files(run_dir)
    assert stored


def test_a_run_is_stored_once_and_then_what_is_new(tmp_path: Path) -> None:
    assert catch_up(tmp_path).num_bytes == 0
    assert not store_folder(tmp_path).exists(), "nothing is made where nothing was recorded"
    write(tmp_path, range(5))
    size = sum(file.stat().st_size for file in telemetry_folder(tmp_path).glob("*.jsonl"))
    found = catch_up(tmp_path)
    assert (found.folder, found.num_bytes, found.left_bytes) == (store_folder(tmp_path), size, 0)
    check(tmp_path)
    assert catch_up(tmp_path).num_bytes == 0
    write(tmp_path, range(3, 8))
    with line_file(tmp_path, 0).open("a") as file:
        file.write('{"v":1,"kind":"st')
    assert catch_up(tmp_path).num_bytes > 0
    check(tmp_path)
    assert len(live_segments(store_folder(tmp_path))) == 2


@pytest.mark.full
def test_a_large_run_is_stored_in_pieces_that_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(100))
    monkeypatch.setattr(writing, "FLUSH_BYTES", 10_000)
    monkeypatch.setattr(module, "MERGE_ABOVE", 4)
    monkeypatch.setattr(module, "MOST_READ_BYTES", 4_000)
    said = list[tuple[int, int]]()
    found = catch_up(tmp_path, progress=lambda done, total: said.append((done, total)))
    assert len(said) > 10
    assert said[-1] == (found.num_bytes, found.num_bytes)
    assert said == sorted(said)
    assert len(live_segments(store_folder(tmp_path))) < len(said) / 2
    check(tmp_path)


def test_a_deadline_leaves_the_rest_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(100))
    monkeypatch.setattr(module, "MOST_READ_BYTES", 2000)
    found = catch_up(tmp_path, deadline_s=0.0)
    assert found.num_bytes == 0
    assert found.left_bytes == sum(
        file.stat().st_size for file in telemetry_folder(tmp_path).glob("*.jsonl")
    )
    assert catch_up(tmp_path, deadline_s=60.0).left_bytes == 0
    check(tmp_path)


def test_a_store_process_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    with StoreLock(store_folder(tmp_path)) as lock:
        assert lock.acquire(for_life=True)
        began_s = time.monotonic()
        found = catch_up(tmp_path)
        assert time.monotonic() - began_s < 1.0
        assert found.is_held
        assert found.num_bytes == 0
    assert catch_up(tmp_path).num_bytes > 0
    check(tmp_path)


def test_another_reader_is_waited_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(2))
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.1)
    with StoreLock(store_folder(tmp_path)) as lock:
        assert lock.acquire()
        began_s = time.monotonic()
        assert catch_up(tmp_path).is_held
        assert time.monotonic() - began_s >= 0.1


def test_a_copy_of_a_run_goes_on_with_its_store(tmp_path: Path) -> None:
    write(tmp_path / "run", range(3))
    catch_up(tmp_path / "run")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    assert catch_up(copy).num_bytes == 0
    write(copy, range(3, 5))
    assert catch_up(copy).num_bytes > 0
    check(copy)


def test_a_replaced_file_is_another_start_of_its_rank(tmp_path: Path) -> None:
    write(tmp_path, range(2), ranks=1)
    catch_up(tmp_path)
    line_file(tmp_path, 0).unlink()
    write(tmp_path, range(4), ranks=1)
    catch_up(tmp_path)
    from pyarrow import parquet

    segments = live_segments(store_folder(tmp_path))
    files = [file for segment in segments if (file := segment.table("steps"))]
    found = [(r["start"], r["step"]) for f in files for r in parquet.read_table(f).to_pylist()]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_a_folder_that_cannot_be_written_is_stored_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a read-only disk: the lock cannot be made. (Tests may run as root, whom no permission
    stops.)"""
    run_dir = tmp_path / "run"
    write(run_dir, range(3))
    catch_up(run_dir)
    write(run_dir, range(3, 6))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    opened = os.open

    def refusing(path: object, flags: int, mode: int = 0o777) -> int:
        if str(path) == str(store_folder(run_dir) / ".lock"):
            raise OSError(30, "Read-only file system")
        return opened(str(path), flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    found = catch_up(run_dir)
    assert found.folder != store_folder(run_dir)
    assert found.folder.is_relative_to(tmp_path)
    check(run_dir, found.folder)
    assert len(live_segments(found.folder)) == 2, "the first is the run's own"
    assert len(live_segments(store_folder(run_dir))) == 1
    assert catch_up(run_dir).num_bytes == 0


def test_what_is_too_much_is_forgotten_and_not_stored_again(tmp_path: Path) -> None:
    write(tmp_path, range(5))
    (tmp_path / "config.json").write_text(json.dumps({"telemetry": {"keep_gb": 1e-9}}))
    catch_up(tmp_path)
    assert {one.table for one in deleted(store_folder(tmp_path))} == {"spans", "sums", "steps"}
    left = rows_of_store(store_folder(tmp_path))
    assert {row[0] for row in left} == {"ranks"}
    assert catch_up(tmp_path).num_bytes == 0


def test_a_file_that_cannot_be_read_leaves_the_rest(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    (telemetry_folder(tmp_path) / "rank_00009.jsonl").symlink_to(tmp_path / "nowhere")
    (telemetry_folder(tmp_path) / "rank_00010.jsonl").touch()
    assert catch_up(tmp_path).num_bytes > 0
    positions = json.loads(
        (live_segments(store_folder(tmp_path))[0].path / "positions.json").read_text()
    )
    assert len(positions["positions"]) == 3
