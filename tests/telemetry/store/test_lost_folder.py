"""A run that is looked at while its disk becomes full and has room again, or its folder goes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.telemetry.synthetic import Job, write_lines
from megascale.errors import DataError
from megascale.telemetry.store import catch_up, writing
from megascale.telemetry.store.run import Run, open_run
from megascale.telemetry.store.segments import store_folder, write_segment
from megascale.telemetry.writer import line_file
from megascale.topology import Mesh


def _num_steps(run: Run) -> int:
    return int(run.query("SELECT count(*) AS n FROM steps WHERE rank = 1").to_pylist()[0]["n"])


def test_what_comes_is_stored_elsewhere_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "run", Job(mesh=Mesh(1, 2, 1), num_steps=12, micro_batches=2))
    usual = store_folder(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()

    def refuse(folder: Path, *arguments: Any, **options: Any) -> Path:
        if folder == usual:
            raise DataError("no space left on device")
        return write_segment(folder, *arguments, **options)

    file = line_file(tmp_path / "run", 1)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with open_run(tmp_path / "run") as run:
        num_before = _num_steps(run)
        with file.open("ab") as rest:
            rest.write(whole[len(whole) // 2 :])
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
            patch.setattr(writing, "write_segment", refuse)
            with pytest.raises(DataError, match="no space"):  # for another reason than the disk
                run.refresh()
            patch.setattr(catch_up, "_is_disk_full", lambda _folder: True)
            assert run.refresh()
            assert _num_steps(run) == 12 > num_before
            assert any("its disk is full" in text for text in run.caveats())
            assert not run.refresh()
        assert run.refresh()
        assert _num_steps(run) == 12
        assert run.caveats() == []


def test_a_folder_that_goes_is_said(tmp_path: Path) -> None:
    write_lines(tmp_path / "run", Job(mesh=Mesh(1, 2, 1), num_steps=12, micro_batches=2))
    with open_run(tmp_path / "run") as run:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(DataError, match="run is gone"):
            run.refresh()
