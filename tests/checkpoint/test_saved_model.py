"""Which checkpoint a path of the user's names, and what is told where it names none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from megascale.checkpoint import save_checkpoint, write_hf_folder
from megascale.checkpoint.saved_model import find_checkpoint, open_saved_model
from megascale.errors import CheckpointError
from tests.checkpoint.layouts import whole
from tests.distributed import run_ranks

META = {"model": {"preset": "tiny-gpt", "max_seq_len": None}, "seq_len": 16}
WEIGHT = torch.arange(6.0).view(2, 3)


def _save(run: Path, step: int, meta: dict[str, object]) -> Path:
    return save_checkpoint(run / "checkpoints", step, [whole("master/w", WEIGHT)], meta)


def test_a_run_folder_and_a_checkpoint_open_alike(tmp_path: Path) -> None:
    first, second = _save(tmp_path, 1, META), _save(tmp_path, 2, META)
    assert open_saved_model(tmp_path).checkpoint == second
    saved = open_saved_model(first)
    assert (saved.checkpoint, saved.num_positions, saved.tokenizer) == (first, 16, None)
    assert saved.model.hidden_size == 64
    assert torch.equal(saved.parameter("w"), WEIGHT)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_saved_model(first).tokenizer == tmp_path.resolve() / "tokenizer.json"


def test_a_torn_checkpoint_is_skipped_in_a_run_and_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, torn = _save(tmp_path, 1, META), _save(tmp_path, 2, META)
    (torn / "rank-00000.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path) == good
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors has 0 bytes"):
        find_checkpoint(torn)


def test_a_folder_of_checkpoints_is_as_good_as_a_run(tmp_path: Path) -> None:
    """`megascale checkpoint convert` makes such a one."""
    _save(tmp_path, 1, META)
    newest = _save(tmp_path, 2, META)
    assert find_checkpoint(newest.parent) == newest
    assert torch.equal(open_saved_model(newest.parent).parameter("w"), WEIGHT)


def test_what_lies_elsewhere_is_told_by_its_address(tmp_path: Path) -> None:
    told = "s3://bucket/run is not on a disk.* checkpoint convert s3://bucket/run FOLDER"
    with pytest.raises(CheckpointError, match=told):
        find_checkpoint(Path("s3://bucket/run"))
    with pytest.raises(CheckpointError, match="is no folder"):
        find_checkpoint(tmp_path / "a:" / "b")


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is neither a run folder"):
        find_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint that can be loaded"):
        find_checkpoint(tmp_path)
    write_hf_folder(tmp_path / "hf", [("w", WEIGHT)], {})
    told = "is a Hugging Face folder; first: megascale convert .*initial_load_in_hf = true"
    with pytest.raises(CheckpointError, match=told):
        find_checkpoint(tmp_path / "hf")
    other = _save(tmp_path / "other", 1, {"model": {"width": 3}, "seq_len": 16})
    with pytest.raises(CheckpointError, match=r"unknown key 'width'"):
        open_saved_model(other)


def _refused(rank: int, world_size: int, path: str) -> str:
    import torch.distributed as dist

    try:
        find_checkpoint(Path(path), group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("found one")


def test_all_ranks_refuse_together(tmp_path: Path) -> None:
    messages = run_ranks(_refused, 2, str(tmp_path))
    assert all("is neither a run folder" in message for message in messages)
