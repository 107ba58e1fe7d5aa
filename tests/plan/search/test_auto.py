"""A run's layout by itself: the planner's on a cluster, a CPU's rule, the stored one on resume."""

from __future__ import annotations

import json

import pytest

from megascale.config import RunConfig, load_config, with_overrides
from megascale.errors import ConfigError
from megascale.plan.machine.load import load_cluster
from megascale.plan.machine.usable import usable_bytes
from megascale.plan.search.auto import (
    choose_layout,
    cluster_of,
    predict,
    predicted,
    resolve_layout,
)

TINY = [
    "model.preset=tiny-llama",
    "model.num_layers=8",
    "training.seq_len=32",
    "training.global_batch_size=24",
    "parallelism.layout=auto",
]


def _config(*overrides: str) -> RunConfig:
    return load_config(None, [*TINY, *overrides])


def _no_gpu() -> str | None:
    return None


def _never() -> str | None:
    raise AssertionError("nobody asks for the device where a cluster is named")


@pytest.mark.parametrize(
    ("ranks", "batch", "degrees"),
    [
        (4, 24, (1, 1, 4)),
        (3, 24, (1, 1, 3)),
        (5, 24, (1, 5, 1)),  # 5 divides no batch of 24: a pipeline of five
        (16, 24, (1, 2, 8)),  # data 8 divides 24; a pipeline of 2 before tensor 2
        (2, 3, (1, 2, 1)),
    ],
)
def test_on_a_cpu_as_much_data_parallelism_as_the_batch_divides(
    ranks: int, batch: int, degrees: tuple[int, int, int]
) -> None:
    choice = choose_layout(_config(f"training.global_batch_size={batch}"), ranks, _no_gpu)
    layout = choice.layout
    assert (layout.tensor, layout.pipeline, layout.data) == degrees
    assert (layout.virtual, layout.schedule, layout.zero_stage) == (1, "1f1b", 1)
    assert choice.ranked is None
    assert "on a CPU by rule" in str(choice)


def test_on_a_cpu_the_recipes_micro_batch_and_recomputation_stay_where_they_are_legal() -> None:
    keep = ["training.micro_batch_size=3", "activation_checkpoint.mode=full"]
    layout = choose_layout(_config(*keep), 4, _no_gpu).layout
    assert (layout.micro_batch_size, layout.recompute) == (3, "full")
    # 24 / (8 ranks x 3) is a micro-batch; of 4 sequences there would be none: the smaller one
    layout = choose_layout(_config("training.micro_batch_size=4"), 8, _no_gpu).layout
    assert (layout.data, layout.micro_batch_size) == (8, 3)


def test_no_layout_on_a_cpu_names_the_nearest() -> None:
    config = _config("training.global_batch_size=1", "model.num_layers=2", "model.num_heads=2")
    with pytest.raises(ConfigError, match="nearest legal: a global batch of 15, or 2 devices"):
        choose_layout(config, 15, _no_gpu)


def test_on_a_cluster_the_planners_first_and_it_fits() -> None:
    choice = choose_layout(_config("parallelism.cluster=h200"), 4, _never)
    assert choice.ranked is not None
    assert choice.layout == choice.ranked.layout
    assert choice.ranked.place == 1
    assert choice.ranked.most_bytes < usable_bytes(load_cluster("h200").device)
    assert "predicted for cluster 'h200'" in str(choice)
    again = choose_layout(_config("parallelism.cluster=h200"), 4, _never)
    assert again == choice, "all who choose, choose alike"
    assert json.loads(json.dumps(choice.document()))["predicted"]["step_s"] == choice.ranked.step_s


def test_a_cluster_is_found_by_its_devices_name() -> None:
    assert cluster_of("NVIDIA H200") == "h200"
    assert cluster_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert cluster_of("NVIDIA H100 80GB HBM3") == "h100"
    choice = choose_layout(_config(), 2, lambda: "NVIDIA H200")
    assert choice.cluster == "h200"
    with pytest.raises(ConfigError, match="has the device 'Apple M4'; measure this one with"):
        choose_layout(_config(), 2, lambda: "Apple M4")


def test_the_overrides_make_the_layout_and_leave_the_number_of_replicas_open() -> None:
    resolved = resolve_layout(_config(), 4, _no_gpu)
    assert resolved.choice is not None
    config = resolved.config
    assert config.parallelism.layout == "given"
    assert config == with_overrides(_config(), resolved.overrides)
    assert config.mesh(4).data == 4
    assert config.mesh(8).data == 8


def test_a_resumed_run_keeps_its_layout() -> None:
    first = with_overrides(
        _config("parallelism.layout=given"), ["parallelism.pipeline_parallel_size=2"]
    )
    resolved = resolve_layout(_config(), 4, _never, stored=first)
    assert resolved.choice is None
    assert resolved.config.mesh(4).pipeline == 2
    assert "kept from the run's start: TP 1, PP 2, DP 2" in resolved.told
    fewer = resolve_layout(_config(), 2, _never, stored=first)
    assert fewer.config.mesh(2).data == 1


def test_a_stored_layout_that_does_not_fit_the_ranks_is_chosen_anew_and_it_is_said() -> None:
    first = with_overrides(
        _config("parallelism.layout=given"), ["parallelism.pipeline_parallel_size=2"]
    )
    resolved = resolve_layout(_config(), 3, _no_gpu, stored=first)
    assert resolved.config.mesh(3).data == 3
    assert "the run's stored layout does not fit 3 ranks (3 ranks cannot hold" in resolved.told


def test_who_needs_a_mesh_before_a_layout_is_chosen_is_told() -> None:
    with pytest.raises(ConfigError, match=r"layout is 'auto': .*layout=given"):
        _config().mesh(4)


def test_the_own_layouts_step_is_predicted() -> None:
    own = with_overrides(_config(), ["parallelism.layout=given", "parallelism.cluster=h200"])
    ranked = predict(own, 4, "h200")
    assert ranked.layout.data == 4
    assert sum(ranked.parts.values()) == pytest.approx(ranked.step_s)
    assert predicted(ranked, "h200").startswith("predicted for cluster 'h200': ")
