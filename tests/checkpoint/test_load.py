"""What loading refuses, what it converts, and that all ranks fail together."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import (
    FullReader,
    find_latest,
    load,
    load_checkpoint,
    load_newest,
    read_meta,
    save_checkpoint,
    verify,
)
from megascale.errors import CheckpointError
from tests.checkpoint.layouts import empty, reference, whole
from tests.checkpoint.reading.saving import CountingFolder
from tests.distributed import run_ranks


def _save(root: Path) -> Path:
    pieces = [whole(key, tensor) for key, tensor in reference().items()]
    return save_checkpoint(root, 1, pieces, {"seed": 3})


def test_a_missing_key_is_another_model(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"another model: it has no 'master/layers.1.attn.q.weight' "
        r"\(nearest: 'master/layers.0.attn.q.weight'\)",
    ):
        load_checkpoint(_save(tmp_path), [whole("master/layers.1.attn.q.weight", torch.zeros(1))])


def test_another_shape_is_another_model(tmp_path: Path) -> None:
    message = r"'master/layers.0.attn.q.weight' was saved as \(13, 7\), wanted \(26, 7\)"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(
            _save(tmp_path), [whole("master/layers.0.attn.q.weight", torch.zeros(26, 7))]
        )


def test_a_saved_tensor_that_nobody_wants_is_another_model(tmp_path: Path) -> None:
    wanted = {key: tensor for key, tensor in reference().items() if ".k." not in key}
    with pytest.raises(CheckpointError, match=r"also holds 'master/layers.0.attn.k.weight'"):
        load_checkpoint(_save(tmp_path), [whole(key, tensor) for key, tensor in wanted.items()])


def test_a_kind_of_state_can_be_left_out(tmp_path: Path) -> None:
    tensors = {key: torch.zeros_like(t) for key, t in reference().items() if "master/" in key}
    load_checkpoint(_save(tmp_path), [whole(key, tensor) for key, tensor in tensors.items()])
    assert all(torch.equal(tensor, reference()[key]) for key, tensor in tensors.items())


def test_other_dtypes_are_converted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "exp_avg_sq/layers.0.attn.q.weight"
    parameter = torch.nn.Parameter(torch.zeros(13, 7, dtype=torch.bfloat16))
    with caplog.at_level(logging.INFO):
        load_checkpoint(_save(tmp_path), [whole(key, parameter)])
    assert torch.equal(parameter, reference()[key].bfloat16())
    assert "1 pieces are converted from torch.float64 to torch.bfloat16" in caplog.text


def test_no_such_directory(tmp_path: Path) -> None:
    for read in (read_meta, FullReader, lambda path: load_checkpoint(path, [])):
        with pytest.raises(CheckpointError, match="no such directory"):
            read(tmp_path / "step-00000009")


def _load_wrong_on_rank_1(rank: int, world_size: int, path: str) -> str:
    shape = (13, 7) if rank == 0 else (7, 13)
    try:
        piece = whole("master/layers.0.attn.q.weight", torch.zeros(shape))
        load_checkpoint(Path(path), [piece], group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_all_ranks_fail_together(tmp_path: Path) -> None:
    first, second = run_ranks(_load_wrong_on_rank_1, 2, str(_save(tmp_path)))
    assert first == second
    assert "rank 1 of 2: a checkpoint of another model" in first


def test_full_reader(tmp_path: Path) -> None:
    reader = FullReader(_save(tmp_path))
    assert reader.keys() == sorted(reference())
    assert reader.keys("exp_avg/") == [
        "exp_avg/layers.0.attn.o.weight",
        "exp_avg/layers.0.attn.q.weight",
    ]
    for key, tensor in reference().items():
        assert reader.shape(key) == tuple(tensor.shape)
        assert reader.dtype(key) == tensor.dtype
        assert torch.equal(reader.read(key), tensor)
    with pytest.raises(CheckpointError, match="has no tensor 'master/absent'"):
        reader.read("master/absent")


def test_tensors_of_one_block_are_read_once(tmp_path: Path) -> None:
    path = _save(tmp_path)
    storage = CountingFolder(tmp_path)
    with mock.patch.object(load, "opened", return_value=(storage, path.name)):
        reader = FullReader(path, verified=True)
        for key in reader.keys():  # noqa: SIM118 (no mapping)
            reader.read(key)
    assert storage.num_bytes == (path / "rank-00000.safetensors").stat().st_size


def test_finding_reads_no_data_and_loading_each_byte_once(tmp_path: Path) -> None:
    path = _save(tmp_path)
    storage = CountingFolder(tmp_path)
    with mock.patch.object(load, "opened", return_value=(storage, path.name)):
        assert find_latest(tmp_path) == path
        assert storage.num_bytes == 0
        tensors = empty()
        load_checkpoint(path, [whole(key, tensor) for key, tensor in tensors.items()])
        assert storage.num_bytes == (path / "rank-00000.safetensors").stat().st_size
        verify(path)
    assert storage.num_bytes == 2 * (path / "rank-00000.safetensors").stat().st_size


def test_an_object_store_loads_like_a_folder() -> None:
    root = "memory://loads"
    path = save_checkpoint(root, 1, [whole(key, t) for key, t in reference().items()], {"seed": 3})
    assert (path, find_latest(root)) == (f"{root}/step-00000001", path)
    tensors = empty()
    loaded = load_newest(root, [whole(key, tensor) for key, tensor in tensors.items()])
    assert loaded is not None
    assert loaded.meta == {"seed": 3, "step": 1}
    assert all(torch.equal(tensor, reference()[key]) for key, tensor in tensors.items())
    assert torch.equal(FullReader(path).read("count/steps"), reference()["count/steps"])


def test_a_key_that_some_ranks_cannot_place_is_told_by_its_nearest(tmp_path: Path) -> None:
    """Every other want lies as it was saved, so the short way is tried first."""
    path = _save(tmp_path)
    pieces = [whole(key, tensor) for key, tensor in empty().items()]
    pieces.append(whole("master/layers.0.norm2.weight", torch.zeros(11)))
    with pytest.raises(CheckpointError, match=r"nearest: 'master/layers.0.norm1.weight'"):
        load_checkpoint(path, pieces)
