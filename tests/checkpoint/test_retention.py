"""The last k stay; the one loaded from and the last good one always do; leftovers go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.checkpoint import apply_retention, find_latest, save_checkpoint
from megascale.checkpoint import retention as retention_module
from megascale.checkpoint.manifest import list_checkpoints
from tests.checkpoint.layouts import whole


def _save(root: Path, *steps: int) -> list[Path]:
    pieces = [whole("master/a", torch.zeros(4))]
    return [save_checkpoint(root, step, pieces, {}) for step in steps]


def _corrupt(path: Path) -> None:
    (path / "rank-00000.safetensors").write_bytes(b"")


def _names(root: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-000000") for path in root.iterdir())


def test_the_last_k_committed_stay(tmp_path: Path) -> None:
    paths = _save(tmp_path, 10, 20, 30, 40)
    assert set(apply_retention(tmp_path, 2)) == set(paths[:2])
    assert _names(tmp_path) == ["30", "40"]
    assert apply_retention(tmp_path, 2) == []


def test_newest_means_committed_last(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20, 30, 11)
    apply_retention(tmp_path, 2)
    assert _names(tmp_path) == ["11", "30"]


def test_the_one_loaded_from_stays(tmp_path: Path) -> None:
    paths = _save(tmp_path, 10, 20, 30, 40)
    apply_retention(tmp_path, 1, protect=[paths[1]])
    assert _names(tmp_path) == ["20", "40"]


def test_the_last_good_one_stays_while_newer_ones_are_corrupt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = _save(tmp_path, 10, 20, 30, 40)
    _corrupt(paths[2])
    _corrupt(paths[3])
    apply_retention(tmp_path, 2)
    assert _names(tmp_path) == ["20", "30", "40"]
    assert "none of the last 2 checkpoints verifies" in caplog.text
    assert find_latest(tmp_path) == paths[1]


def test_nothing_goes_while_nothing_verifies(tmp_path: Path) -> None:
    for path in _save(tmp_path, 10, 20, 30):
        _corrupt(path)
    assert apply_retention(tmp_path, 1) == []
    assert _names(tmp_path) == ["10", "20", "30"]


def test_leftovers_older_than_the_newest_committed_go(tmp_path: Path) -> None:
    (tmp_path / "step-00000020").mkdir()
    _save(tmp_path, 10, 20, 30)
    for name in ("step-00000015", "step-00000030.1", "step-00000040"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
    apply_retention(tmp_path, 3)
    assert _names(tmp_path) == ["10", "20.1", "30", "30.1", "40"]


@pytest.mark.parametrize("mark", [None, "xx\n"])
def test_a_checkpoint_whose_mark_is_lost_stays(tmp_path: Path, mark: str | None) -> None:
    paths = _save(tmp_path, 10, 20, 30)
    (paths[0] / "COMMITTED").unlink()
    if mark is not None:
        (paths[0] / "COMMITTED").write_text(mark)
    assert apply_retention(tmp_path, 1) == [paths[1]]
    assert list_checkpoints(tmp_path) == ([paths[2]], [], [paths[0]])


def test_leftovers_stay_while_nothing_is_committed(tmp_path: Path) -> None:
    (tmp_path / "step-00000020").mkdir()
    assert apply_retention(tmp_path, 1) == []
    assert _names(tmp_path) == ["20"]


def test_the_one_saved_just_now_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = _save(tmp_path, 10, 20)
    monkeypatch.setattr(retention_module, "verify", lambda path: pytest.fail(f"hashed {path}"))
    assert apply_retention(tmp_path, 1, known_good=paths[1]) == paths[:1]


def test_a_kill_while_deleting_leaves_an_unmarked_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = _save(tmp_path, 10, 20)
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(OSError("killed")))
    assert apply_retention(tmp_path, 1) == []
    monkeypatch.undo()
    assert not (paths[0] / "COMMITTED").exists()
    assert apply_retention(tmp_path, 1) == paths[:1]
