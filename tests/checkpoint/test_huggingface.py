"""Hugging Face folders: `transformers` and `safetensors` read what is written, and the reverse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megascale.checkpoint import HfFolder, write_hf_folder
from megascale.errors import CheckpointError

FUSED = torch.randn(6, 8)
TENSORS: dict[str, Tensor] = {
    "embed.weight": torch.randn(10, 4),  # 160 bytes
    "q.weight": FUSED[:2],  # views of one storage
    "k.weight": FUSED[2:],
    "norm.weight": torch.randn(4).bfloat16(),
    "t.weight": torch.randn(3, 5).t(),
}


def _check(folder: Path) -> None:
    read = HfFolder(folder)
    assert read.names() == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert read.shape(name) == tuple(tensor.shape)
        assert read.read(name).dtype == tensor.dtype
        assert torch.equal(read.read(name), tensor)


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    output = tmp_path / "deep" / "hf"
    write_hf_folder(output, TENSORS.items(), {"model_type": "llama"}, files=[tokenizer])
    names = {path.name for path in output.iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json"}
    assert HfFolder(output).config == {"model_type": "llama"}
    _check(output)
    assert [path.name for path in output.parent.iterdir()] == ["hf"]


def test_shards_and_index(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "hf", TENSORS.items(), {}, max_shard_bytes=150)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    # 160 is over the limit and alone; 64; 128 + 8; 60.
    shards = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert index["weight_map"] == {
        "embed.weight": shards[0],
        "q.weight": shards[1],
        "k.weight": shards[2],
        "norm.weight": shards[2],
        "t.weight": shards[3],
    }
    assert {name: set(load_file(tmp_path / "hf" / name)) for name in shards} == {
        shard: {name for name, file in index["weight_map"].items() if file == shard}
        for shard in shards
    }
    _check(tmp_path / "hf")


@pytest.mark.full
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_loads_it_and_we_load_what_it_saves(
    tmp_path: Path, max_shard_bytes: int
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
    )
    model = transformers.LlamaForCausalLM(config)
    weights = dict(model.state_dict())
    ours = tmp_path / "ours"
    write_hf_folder(ours, weights.items(), config.to_dict(), max_shard_bytes=max_shard_bytes)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(ours)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in weights.items())

    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_bytes)
    read = HfFolder(tmp_path / "theirs")
    assert read.names() == sorted(weights)
    assert all(torch.equal(read.read(name), value) for name, value in weights.items())
    assert read.config["hidden_size"] == 32


def test_an_output_that_holds_something_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for output in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            write_hf_folder(output, TENSORS.items(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_output_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    write_hf_folder(tmp_path / "hf", TENSORS.items(), {})
    _check(tmp_path / "hf")


def test_a_failure_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "a", torch.zeros(100)
        yield "b", torch.zeros(100)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"the disk of .*/hf is full"):
        write_hf_folder(tmp_path / "hf", broken(), {}, max_shard_bytes=100)
    assert list(tmp_path.iterdir()) == []


def _folder(tmp_path: Path) -> Path:
    write_hf_folder(tmp_path / "hf", TENSORS.items(), {}, max_shard_bytes=150)
    return tmp_path / "hf"


def test_reading_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        HfFolder(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="only safetensors weights are read"):
        HfFolder(tmp_path)
    folder = _folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tensor 'q.weigth'; nearest: 'q.weight'"):
        HfFolder(folder).read("q.weigth")
    second = folder / "model-00002-of-00004.safetensors"
    save_file({"other": torch.zeros(1)}, second)
    with pytest.raises(CheckpointError, match=r"says .* holds 'q.weight', but it does not"):
        HfFolder(folder).read("q.weight")
    second.write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004.safetensors is damaged"):
        HfFolder(folder).read("q.weight")
    second.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004.safetensors is missing"):
        HfFolder(folder).read("q.weight")
    assert torch.equal(HfFolder(folder).read("k.weight"), TENSORS["k.weight"])
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is no JSON"):
        assert HfFolder(folder).config
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        assert HfFolder(folder).config
