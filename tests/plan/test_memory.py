"""Predicted memory against published formulas and against hand counts."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.config import ModelConfig, RunConfig, parse_config
from megascale.plan.memory import (
    deferred_bytes_per_token,
    layer_bytes_per_token,
    predict_memory,
)
from megascale.topology import Mesh


def _config(**sections: Any) -> RunConfig:
    return parse_config(sections)


def test_a_gpt_layer_keeps_korthikanti_s_34_sbh_less_the_dropout_masks() -> None:
    """34 s b h with flash attention (2205.05198); two one-byte masks are pure functions here."""
    model = ModelConfig(preset="gpt3-13b")
    statistics = 2 * 8 + 4 * model.num_heads
    assert layer_bytes_per_token(model, "none", 2, 64) == 32 * model.hidden_size + statistics


def test_a_layer_by_hand() -> None:
    """Llama: norms in and out 4 x 8, q 8, k and v 2 x 4, o's input 8, gate and up 24, fc2's 12."""
    shape: dict[str, Any] = {
        "hidden_size": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 12,
    }
    elements = 32 + 8 + 8 + 8 + 24 + 12
    llama = ModelConfig(**shape)
    assert layer_bytes_per_token(llama, "none", 2, 64) == 2 * elements + 2 * 4 + 4 * 4
    assert layer_bytes_per_token(llama, "selective", 2, 64) == 2 * (elements - 12) + 2 * 4 + 4 * 4
    assert layer_bytes_per_token(llama, "full", 2, 64) == 2 * 8
    dropped = ModelConfig(**shape, attention_dropout=0.1)
    assert layer_bytes_per_token(dropped, "none", 2, 64) == 2 * elements + 2 * 4 + 6 * 4 * 64
    parallel = ModelConfig(**shape, block="parallel")
    assert layer_bytes_per_token(parallel, "none", 2, 64) == 2 * (elements - 16) + 4 + 4 * 4


@pytest.mark.parametrize(
    ("dtype", "parameter", "optimizer"),
    [("bfloat16", 2, 12), ("float32", 4, 8), ("float64", 8, 16)],
)
def test_state_bytes_a_parameter(dtype: str, parameter: int, optimizer: int) -> None:
    config = _config(
        model={"preset": "tiny-llama"}, training={"dtype": dtype, "global_batch_size": 8}
    )
    memory = predict_memory(config, Mesh(data=4), 0)
    count = memory.parameter_bytes // parameter
    assert count == 238_144
    assert memory.main_gradient_bytes == max(4, parameter) * count
    assert memory.optimizer_bytes == optimizer * count // 4


def test_zero_2_keeps_a_shard_and_two_buckets() -> None:
    def gradient_bytes(bucket_mb: float, vocab_size: int = 512) -> int:
        config = _config(
            model={"preset": "tiny-llama", "vocab_size": vocab_size},
            training={"dtype": "bfloat16", "global_batch_size": 8},
            parallelism={"zero_stage": 2, "bucket_mb": bucket_mb},
        )
        return predict_memory(config, Mesh(data=4), 0).main_gradient_bytes

    count, layer = 238_144, 43_136
    assert gradient_bytes(0.001) == count + 4 * 2 * layer
    wide_count = count + 2 * 64 * (8192 - 512)  # embedding and head, each larger than a layer
    head = 64 * 8192 + 64  # and the final norm, which is in its unit
    assert gradient_bytes(0.001, 8192) == wide_count + 4 * 2 * head
    assert gradient_bytes(1000.0) == count + 4 * count  # one bucket: no more than all of it


def test_gradients_in_bf16_need_a_bucket_to_send_and_one_to_receive() -> None:
    def reduction_bytes(mesh: Mesh, dtype: str = "float32", **parallelism: Any) -> int:
        config = _config(
            model={"preset": "tiny-llama"},
            training={"dtype": dtype, "global_batch_size": 8},
            parallelism={"grad_reduce_dtype": "bfloat16", **parallelism},
        )
        return predict_memory(config, mesh, 0).reduction_bytes

    count, layer = 238_144, 43_136
    assert reduction_bytes(Mesh(data=4)) == 2 * 2 * count  # one bucket holds all
    assert reduction_bytes(Mesh(data=4), bucket_mb=0.001) == 2 * 2 * layer
    limit = 200_000
    assert reduction_bytes(Mesh(data=4), bucket_mb=4 * limit / 1e6) == 2 * 2 * limit
    assert reduction_bytes(Mesh(data=4), "float64", bucket_mb=8 * limit / 1e6) == 2 * 2 * limit
    assert reduction_bytes(Mesh(data=4), zero_stage=2, bucket_mb=0.001) == 2 * 2 * layer
    assert reduction_bytes(Mesh(data=1)) == 0
    assert reduction_bytes(Mesh(data=4), grad_reduce_dtype="main") == 0


def test_activations_follow_the_schedule() -> None:
    """Stage 0 of 1F1B holds p micro-batches, the last stage one; GPipe holds all."""

    def activations(schedule: str, stage: int) -> int:
        config = _config(
            model={"preset": "tiny-llama", "num_layers": 8},
            training={"global_batch_size": 8},
            parallelism={"pipeline_parallel_size": 4, "pipeline_schedule": schedule},
        )
        return predict_memory(config, Mesh(pipeline=4), stage).activation_bytes

    one = activations("1f1b", 2) // 2
    assert activations("1f1b", 0) == 4 * one
    assert activations("1f1b", 1) == 3 * one
    assert activations("gpipe", 0) == 8 * one
    final_norm = 2 * 4 * 64 * 256
    assert activations("1f1b", 3) == one + final_norm


def test_halves_keep_the_operands_of_weight_gradients() -> None:
    """Stage s of p holds p - s activations and s deferred pieces with them."""

    def activations(stage: int, **parallelism: Any) -> int:
        config = _config(
            model={"preset": "tiny-llama", "num_layers": 8},
            training={"global_batch_size": 8},
            parallelism={"pipeline_parallel_size": 4, **parallelism},
        )
        return predict_memory(config, Mesh(pipeline=4), stage).activation_bytes

    tokens = 256
    kept = activations(2) // 2
    model = ModelConfig(preset="tiny-llama")
    partial_sums = 2 * 132 * model.hidden_size * 4  # of two norms, a program's each
    deferred = 2 * (tokens * deferred_bytes_per_token(model, 4) + partial_sums)
    assert deferred > kept
    for stage in range(3):
        found = activations(stage, pipeline_schedule="zb_h1")
        rows = tokens * model.hidden_size * 4 if stage == 0 else 0  # of the embedding's gradient
        assert found == (3 - stage) * kept + (stage + 1) * deferred + rows
    one = activations(2, pipeline_schedule="1f1b", join_weight_gradients=4)
    assert one == max(2 * kept + 3 * deferred, kept + 4 * deferred)
    last_pieces = activations(2, pipeline_schedule="1f1b", join_weight_gradients=100)
    assert last_pieces == max(2 * kept + 6 * deferred, kept + 7 * deferred, 8 * deferred)


def test_joined_weight_gradients_are_kept_gathered() -> None:
    def activations(**parallelism: Any) -> int:
        config = _config(
            model={"preset": "tiny-llama"},
            parallelism={"tensor_parallel_size": 2, **parallelism},
            training={"global_batch_size": 8},
        )
        return predict_memory(config, Mesh(tensor=2), 0).activation_bytes

    model = ModelConfig(preset="tiny-llama")
    hidden = 4 * 256 * model.hidden_size  # of all tokens: what ranks gather
    layers = model.num_layers * deferred_bytes_per_token(model, 4, 2) * 256 // 2
    partial_sums = model.num_layers * 2 * 128 * model.hidden_size * 4  # a row each of 128
    head = hidden + 4 * 256 * model.vocab // 2
    one = layers + partial_sums + head + hidden  # and the embedding's gradient
    assert activations(join_weight_gradients=2) == max(activations() + one, 2 * one)


def test_a_deferred_layer_by_hand() -> None:
    """Llama: in and out of qkv 8 + 16, of o 8 + 8, of gate and up 8 + 24, of fc2 12 + 8."""
    shape: dict[str, Any] = {
        "hidden_size": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 12,
    }
    assert deferred_bytes_per_token(ModelConfig(**shape), 2) == 2 * (24 + 16 + 32 + 20)
    gathered = 4 * 8  # by a second rank: inputs of qkv and of gate and up, gradients of o and fc2
    assert deferred_bytes_per_token(ModelConfig(**shape), 2, 2) == 2 * (92 + gathered)
    parallel = ModelConfig(**shape, block="parallel")
    assert deferred_bytes_per_token(parallel, 2) == 2 * (8 + 16 + 24 + 8 + 12 + 8)


def test_tensor_parallel_divides_activations_logits_and_sharded_parameters() -> None:
    def memory(tp: int) -> Any:
        config = _config(model={"preset": "tiny-llama"}, parallelism={"tensor_parallel_size": tp})
        return predict_memory(config, Mesh(tensor=tp), 0)

    one, two = memory(1), memory(2)
    assert two.activation_bytes * 2 == one.activation_bytes
    assert two.logits_bytes * 2 == one.logits_bytes == 4 * 256 * 512
    norms = 4 * 9 * 64
    assert 2 * (two.parameter_bytes - norms) == one.parameter_bytes - norms


def test_175b_state_of_the_paper_s_layout() -> None:
    """[derived] 175B over TP8 x PP8: 5.5 GB of bf16 parameters, 8.2 GB of optimizer at DP 4."""
    config = _config(
        model={"preset": "megascale-175b"},
        parallelism={
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 8,
            "virtual_pipeline_size": 6,
        },
        training={"dtype": "bfloat16", "seq_len": 2048, "global_batch_size": 256},
    )
    memory = predict_memory(config, Mesh(8, 4, 8), 1)
    assert memory.parameter_bytes == pytest.approx(5.5e9, rel=0.02)
    assert memory.optimizer_bytes == pytest.approx(8.2e9, rel=0.02)
