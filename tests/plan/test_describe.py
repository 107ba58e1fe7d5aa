"""The dry run's report: complete, and refused where the run would be."""

from __future__ import annotations

import json

import pytest

from megascale.config import parse_config
from megascale.errors import ConfigError
from megascale.plan.describe import describe


def test_the_report_names_groups_layers_parameters_and_memory() -> None:
    config = parse_config(
        {
            "model": {"preset": "tiny-llama", "num_layers": 5},
            "parallelism": {
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 2,
                "virtual_pipeline_size": 2,
            },
            "training": {"seq_len": 32, "global_batch_size": 8},
        }
    )
    description = describe(config, 8)
    text = str(description)
    assert "tensor parallel 2: [0, 1] [2, 3] [4, 5] [6, 7]" in text
    assert "data parallel 2: [0, 2] [1, 3] [4, 6] [5, 7]" in text
    assert "interleaved_1f1b, decoupled transfers, 4 micro-batches a step" in text
    assert description.stages[0].chunks == {0: range(2), 2: range(3, 4)}
    assert description.stages[1].chunks == {1: range(2, 3), 3: range(4, 5)}
    assert description.total_parameters == 238_144 + 43_136
    data = json.loads(json.dumps(description.to_dict()))
    assert data["groups"]["pipeline"][0] == [0, 4]
    memory = data["stages"][0]["memory_bytes"]
    assert memory.pop("total_bytes") == sum(memory.values())


def test_a_shared_head_and_halves_are_said() -> None:
    config = parse_config(
        {
            "model": {"preset": "tiny-llama", "num_layers": 4},
            "parallelism": {
                "pipeline_parallel_size": 2,
                "virtual_pipeline_size": 2,
                "pipeline_schedule": "interleaved_zb",
                "share_head": True,
            },
            "training": {"seq_len": 32, "global_batch_size": 8},
        }
    )
    description = describe(config, 2)
    text = str(description)
    assert "interleaved_zb, decoupled transfers, 8 micro-batches a step, head shared by 2" in text
    assert description.to_dict()["shared_head"] is True
    first, last = description.stages
    assert sum(stage.rank_parameters for stage in (first, last)) == description.total_parameters
    assert first.bounds.deferred == 1
    assert last.bounds.deferred == 2


def test_joined_weight_gradients_cut_the_backwards_of_every_schedule() -> None:
    def deferred(joined: int) -> list[int]:
        parallelism = {"pipeline_parallel_size": 2, "join_weight_gradients": joined}
        config = parse_config(
            {
                "model": {"preset": "tiny-llama", "num_layers": 4},
                "parallelism": parallelism,
                "training": {"seq_len": 32, "global_batch_size": 8},
            }
        )
        return [stage.bounds.deferred for stage in describe(config, 2).stages]

    assert deferred(1) == [0, 0]
    assert deferred(2) == [1, 1]


def test_an_illegal_layout_is_refused() -> None:
    config = parse_config({"model": {"preset": "tiny-llama"}})
    with pytest.raises(ConfigError, match="nearest legal"):
        describe(config, 3)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is not known"):
        describe(parse_config({}), 1)
