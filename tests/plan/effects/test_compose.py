"""Effects of a case on a cluster: each is its model's figure, switched on alone and together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.config import ModelConfig
from megascale.errors import ConfigError
from megascale.plan.case import Case, Job, Layout
from megascale.plan.effects.compose import (
    EffectSwitches,
    effect_parts,
    effects_of,
    recovery_at_scale,
    uplinks_of,
)
from megascale.plan.effects.ecmp import Uplinks, slowest_flow
from megascale.plan.effects.effects import NO_EFFECTS, combine
from megascale.plan.effects.failures import RECOVERY
from megascale.plan.effects.launch_skew import launch_skew
from megascale.plan.effects.stragglers import PipelineDepth, Wavering, simulate
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.load import load_cluster

MODEL = ModelConfig(num_layers=96, hidden_size=12288, num_heads=128, vocab_size=64000)
OFF = EffectSwitches(ecmp=False, stragglers=False, launch_skew=False)


def _case(data: int, tensor: int = 8, pipeline: int = 8) -> Case:
    layout = Layout(tensor, pipeline, 6, data, schedule="interleaved_1f1b")
    return Case(Job(MODEL, 32 * data, 2048), layout)


@pytest.fixture(scope="module")
def paper() -> Cluster:
    return load_cluster("paper")


def test_all_off_changes_nothing(paper: Cluster) -> None:
    assert effects_of(_case(192), paper, switches=OFF) == NO_EFFECTS


def test_packed_rings_of_the_paper(paper: Cluster) -> None:
    """192 nodes a ring on sets of 64: one flow leaves a set, so that data meets no conflict; all
    64 nodes send to the next stage in another set, on 24 sets of 8 rails."""
    found = effects_of(_case(192), paper, switches=replace(OFF, ecmp=True))
    assert found.network_share.data == 1.0
    assert found.network_share.tensor == 1.0  # inside nodes
    wanted = slowest_flow(Uplinks(32, 400.0, 200.0), {64: 24 * 8}).value
    assert found.network_share.pipeline == pytest.approx(wanted)
    assert (found.compute_factor, found.launch_skew_s) == (1.0, 0.0)


def test_nodes_as_they_come_cost_the_rings_too(paper: Cluster) -> None:
    shuffled = EffectSwitches(placement="shuffled", stragglers=False, launch_skew=False)
    found = effects_of(_case(48), paper, switches=shuffled)
    packed = effects_of(_case(48), paper, switches=replace(shuffled, placement="packed"))
    assert found.network_share.data < 0.4 < packed.network_share.data == 1.0


def test_a_job_under_one_set_meets_nobody(paper: Cluster) -> None:
    found = effects_of(_case(8), paper, switches=replace(OFF, ecmp=True))
    assert found == NO_EFFECTS


def test_tensor_groups_that_leave_nodes_are_counted(paper: Cluster) -> None:
    parts = effect_parts(_case(8, tensor=16), paper, switches=replace(OFF, ecmp=True))
    assert [part.name for part in parts] == [
        "conflicts, tensor",
        "conflicts, data",
        "conflicts, pipeline",
    ]


def test_each_part_is_its_models_figure(paper: Cluster) -> None:
    case = _case(16)
    parts = {part.name: part for part in effect_parts(case, paper, seed=4)}
    healthy = simulate(case.layout.mesh, PipelineDepth(32, 6), 8, Wavering().evicted, seed=4)
    assert parts["stragglers"].interval == healthy
    assert parts["launch skew"].interval == launch_skew(1024, planned=True)
    assert effects_of(case, paper, seed=4) == combine(part.effects for part in parts.values())


def test_cures_help(paper: Cluster) -> None:
    case = _case(96)
    cured = effects_of(case, paper)
    ill = EffectSwitches(placement="shuffled", evict_slow=False, planned_collection=False)
    found = effects_of(case, paper, switches=ill)
    assert found.compute_factor > cured.compute_factor > 1.0
    assert found.launch_skew_s > 10 * cured.launch_skew_s > 0.0
    assert found.network_share.data < cured.network_share.data


def test_a_seed_repeats(paper: Cluster) -> None:
    one, again, other = (effects_of(_case(12), paper, seed=seed) for seed in (1, 1, 2))
    assert one == again != other


def test_without_a_fabric_there_are_no_conflicts(paper: Cluster) -> None:
    bare = paper.model_copy(update={"fabric": None})
    assert effects_of(_case(16), bare, switches=replace(OFF, ecmp=True)) == NO_EFFECTS
    with pytest.raises(ConfigError, match=r"cluster 'paper' has no \[fabric\]"):
        uplinks_of(bare)


def test_recovery_grows_with_the_job(paper: Cluster) -> None:
    """Of 12,288 GPUs: groups in 23 s, and 3.6 billion parameters of a device (a gated MLP), of
    two bytes and a 192nd of twelve, over a NIC of 25 GB/s."""
    found = recovery_at_scale(_case(192), paper, "hang")
    weights = 96 * 16 * 12288**2 + 64000 * 12288
    assert found.load_s == pytest.approx(weights / 64 * (2 + 12 / 192) / 25e9)
    assert found.restart_s - RECOVERY["hang"].restart_s == pytest.approx(22.8, abs=0.1)
    assert found.detect_s == RECOVERY["hang"].detect_s
    small = recovery_at_scale(_case(1), paper, "hang")
    assert RECOVERY["hang"].total_s < small.total_s < found.total_s
    assert recovery_at_scale(_case(192), paper, "paper") == RECOVERY["paper"]
    faster = recovery_at_scale(_case(192), paper, "hang", seconds_a_call=1e-5)
    assert faster.total_s < found.total_s


def test_bad_switches() -> None:
    with pytest.raises(ConfigError, match="placement 'best'; legal: packed, shuffled"):
        EffectSwitches(placement="best")  # type: ignore[arg-type]
