"""The configuration: every refusal says what was got, what is legal and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from megascale.config import PRESETS, BatchRampUp, RunConfig, TrainingConfig, load_config
from megascale.errors import ConfigError
from megascale.topology import Mesh
from tools.config_reference import sections

REFUSED = [
    (["training.stepz=3"], "unknown key 'stepz'; did you mean 'steps'?"),
    (["trainig.steps=3"], "unknown section 'trainig'; did you mean 'training'?"),
    (["steps=3"], "not section.key=value"),
    (["training.steps"], "not section.key=value"),
    (["training.steps=abc"], "training.steps: got 'abc', legal: a whole number >= 0; give one"),
    (["model.preset=gpt3-174b"], "did you mean 'gpt3-175b'"),
    (["parallelism.tensor_parallel_size=3"], "does not divide model.num_heads 4; legal.*1, 2, 4"),
    (["model.num_kv_heads=3"], "not a multiple of model.num_kv_heads 3"),
    (["model.hidden_size=250"], "not a multiple of model.num_heads"),
    (["parallelism.virtual_pipeline_size=2"], "without a pipeline"),
    (
        ["parallelism.pipeline_parallel_size=4", "parallelism.virtual_pipeline_size=2"],
        "4 cannot fill 8 chunks",
    ),
    (["training.seq_len=255", "parallelism.tensor_parallel_size=2"], "does not divide the 255"),
    (["parallelism.data_parallel_size=0"], "legal: a positive number, or -1"),
    (["model.position=learned", "model.max_seq_len=8"], "longer than the 8 learned positions"),
    (["training.batch_ramp_up={start=2,increment=4,samples=10}"], "misses.*multiple of increment"),
    (["model.hidden_dropout=1.0"], "less than 1"),
    (["model.preset=[1]"], r"model.preset: got \[1\], legal: text or null"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_bad_values_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config(None, overrides)


# keys of each type, what is no value of that type, and what the message says of it
WRONG_TYPES = {
    int: (
        ("training.steps", "model.num_kv_heads", "parallelism.zero_stage", "data.prefetch"),
        ("true", "false", "2.0", "1.5", '"2"', "[2]"),
        "a whole number|1 or 2; give one",
    ),
    float: (
        ("optimizer.lr", "metrics.peak_tflops", "parallelism.bucket_mb", "comm.timeout_s"),
        ("true", "false", '"2"', "[2]"),
        "a number.*; give one",
    ),
    bool: (
        ("data.synthetic", "parallelism.share_head", "telemetry.enable"),
        ("0", "1", "1.0", '"yes"', '"on"'),
        "true or false; give one, such as (true|false)",
    ),
    str: (("job.run_dir", "model.preset"), ("true", "3", "1.5"), "text.*needs quotes"),
}
WRONG = [
    (key, value, legal)
    for keys, values, legal in WRONG_TYPES.values()
    for key in keys
    for value in values
]


@pytest.mark.parametrize("source", ["recipe", "--set"])
@pytest.mark.parametrize(("key", "value", "legal"), WRONG)
def test_a_value_of_another_type_is_refused(
    tmp_path: Path, source: str, key: str, value: str, legal: str
) -> None:
    """Nothing is converted: `true` is no 1, 1 is no `true`, "2" is no 2."""
    recipe = tmp_path / "recipe.toml"
    section, _, name = key.partition(".")
    recipe.write_text(f"[{section}]\n{name} = {value}\n" if source == "recipe" else "")
    with pytest.raises(ConfigError, match=rf"{key}: got .*, legal: .*{legal}") as refused:
        load_config(recipe, [f"{key}={value}"] if source == "--set" else [])
    assert str(refused.value).count("\n") == 0


def test_no_key_of_any_section_was_forgotten() -> None:
    """Every number refuses `true`, every switch refuses 1."""
    tried = 0
    for section in sections().values():
        for key, field in section.model_fields.items():
            kinds = {field.annotation, *get_args(field.annotation)} & {int, float, bool, 1}
            if not kinds:
                continue
            wrong, shown = (1, "1") if bool in kinds else (True, "true")
            with pytest.raises(ValueError, match=rf"\n{key}\n.*got {shown}, legal: "):
                section.model_validate({key: wrong})
            tried += 1
    assert tried > 60


def test_whole_numbers_are_legal_for_numbers() -> None:
    assert load_config(None, ["optimizer.clip_grad=1"]).optimizer.clip_grad == 1.0


def test_several_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, ["training.steps=-1", "optimizer.lr=0"])
    assert "training.steps" in str(error.value)
    assert "optimizer.lr" in str(error.value)


def test_missing_and_broken_recipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder; give a TOML file"):
        load_config(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[training\nsteps=1")
    with pytest.raises(ConfigError, match="does not parse"):
        load_config(broken)


def test_overrides_win_and_round_trip(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[training]\nsteps = 7\n[model]\npreset = "tiny-llama"\n')
    config = load_config(recipe, ["training.steps=9", "model.num_layers=2", "job.run_dir=a b"])
    assert (config.training.steps, config.model.num_layers) == (9, 2)
    assert (config.model.hidden_size, config.job.run_dir) == (64, "a b")
    stored = tmp_path / "config.json"
    stored.write_text(config.model_dump_json())
    assert load_config(stored) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_load(preset: str) -> None:
    config = load_config(None, [f"model.preset={preset}", "training.seq_len=64"])
    assert config.model.preset == preset


def test_mesh_from_world_size() -> None:
    config = load_config(None, ["parallelism.tensor_parallel_size=2", "training.seq_len=64"])
    assert config.mesh(8) == Mesh(2, 4, 1)
    with pytest.raises(ConfigError, match="start a multiple of 2 ranks"):
        config.mesh(3)
    fixed = load_config(None, ["parallelism.data_parallel_size=2"])
    legal = r"leave 4; set it to 4 or -1, or start 2 ranks .*--nodes"
    with pytest.raises(ConfigError, match=legal):
        fixed.mesh(4)


def test_batches_that_do_not_divide() -> None:
    config = load_config(None, ["training.global_batch_size=6", "training.micro_batch_size=2"])
    assert config.mesh(3) == Mesh(1, 3, 1)
    with pytest.raises(ConfigError, match="nearest legal: 4 or 8"):
        config.mesh(2)


def test_too_few_micro_batches_names_the_smallest_legal_batch() -> None:
    config = load_config(
        None, ["parallelism.pipeline_parallel_size=4", "training.global_batch_size=2"]
    )
    with pytest.raises(ConfigError, match="smallest legal global batch is 4, got 2"):
        config.mesh(4)
    interleaved = load_config(
        None,
        [
            "parallelism.pipeline_parallel_size=2",
            "parallelism.virtual_pipeline_size=2",
            "training.global_batch_size=3",
        ],
    )
    with pytest.raises(ConfigError, match="nearest legal global batches are 2 and 4"):
        interleaved.mesh(2)


def test_ramp_up_is_a_function_of_consumed_samples() -> None:
    training = TrainingConfig(
        global_batch_size=8, batch_ramp_up=BatchRampUp(start=2, increment=2, samples=30)
    )
    assert [training.global_batch_at(n) for n in (0, 9, 10, 20, 29, 30, 99)] == [
        2,
        2,
        4,
        6,
        6,
        8,
        8,
    ]
    assert training.batch_sizes() == [2, 4, 6, 8]


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().training.steps = 3  # type: ignore[misc]
