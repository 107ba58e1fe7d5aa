"""The driver's `layout = "auto"`: before anything starts, and only for devices that it knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cluster.driver import layout as module
from megascale.cluster.driver.layout import with_layout
from megascale.errors import ConfigError

SET = [
    "model.preset=tiny-llama",
    "training.seq_len=32",
    "training.global_batch_size=6",
    "parallelism.layout=auto",
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(f'[job]\nrun_dir = "{tmp_path / "run"}"\n')
    return file


def test_a_given_layout_is_left_alone(recipe: Path) -> None:
    overrides = ["parallelism.tensor_parallel_size=2"]
    config, same = with_layout(recipe, overrides, 4, are_ranks_here=False)
    assert same == overrides
    assert config.parallelism.tensor_parallel_size == 2


def test_trainers_get_it_as_overrides_that_fewer_nodes_can_have_too(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gpu_name", lambda: None)
    config, overrides = with_layout(recipe, SET, 4, are_ranks_here=True)
    assert overrides[: len(SET)] == SET
    assert overrides[len(SET)] == "parallelism.layout=given"
    assert (config.mesh(4).pipeline, config.mesh(4).data) == (2, 2)
    assert config.mesh(2).data == 1
    assert "memory_interval" not in config.checkpoint.model_fields_set, "as it was loaded"


def test_what_the_folder_holds_is_kept(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_name", lambda: None)
    given = [*SET, "parallelism.layout=given", "parallelism.tensor_parallel_size=2"]
    config, _ = with_layout(recipe, given, 4, are_ranks_here=True)
    (recipe.parent / "run").mkdir()
    (recipe.parent / "run" / "config.json").write_text(config.model_dump_json())
    kept, _ = with_layout(recipe, SET, 4, are_ranks_here=True)
    assert kept.mesh(4).tensor == 2


def test_devices_of_other_machines_have_to_be_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gpu_name", lambda: "NVIDIA H200")
    with pytest.raises(ConfigError, match="does not know the devices of the nodes"):
        with_layout(recipe, SET, 4, are_ranks_here=False)
    for known in ("parallelism.cluster=h200", "training.device=cpu"):
        config, _ = with_layout(recipe, [*SET, known], 4, are_ranks_here=False)
        assert config.mesh(4).world_size == 4
    _, overrides = with_layout(recipe, SET, 4, are_ranks_here=True)
    assert "parallelism.layout=given" in overrides
    monkeypatch.setattr(module, "gpu_name", lambda: None)
    with pytest.raises(ConfigError, match=r"set parallelism\.cluster"):
        with_layout(recipe, [*SET, "training.device=cuda"], 4, are_ranks_here=True)
