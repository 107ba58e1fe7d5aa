"""The search finds what simulating everything would find, and counts what it says it counts."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.config import load_config
from megascale.errors import ConfigError
from megascale.plan.case import Case, Layout
from megascale.plan.effects.effects import NO_EFFECTS, Effects, NetworkShare
from megascale.plan.estimate import estimate
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.load import load_cluster
from megascale.plan.machine.usable import usable_bytes
from megascale.plan.pricing import price
from megascale.plan.search.finalists import (
    NUM_CANDIDATES,
    candidates,
    finalists,
    group_of,
    kind_of,
    num_computes,
)
from megascale.plan.search.find import find, formula_seconds, judge, legal_space, sweep_of
from megascale.plan.search.fit import most_bytes
from megascale.plan.search.question import Question, question_of
from megascale.plan.search.scale import Scale
from megascale.plan.search.space import Integers, Limits, Space

WIDE = [
    "model.preset=llama3-8b",
    "model.num_layers=11",
    "training.global_batch_size=12",
    "training.seq_len=2048",
    "training.dtype=bfloat16",
]
FEW = Limits(recomputes=("none",), joins=(1,))


def _question(*overrides: str, gpus: int = 4, limits: Limits | None = None) -> Question:
    config = load_config(None, [*WIDE, *overrides])
    return question_of(config, gpus, devices_per_node=8, most_devices=64, limits=limits)


def _cluster(gpus: int = 4) -> Cluster:
    return load_cluster("h200", gpus)


def test_the_formula_of_many_is_that_of_one() -> None:
    """Eleven layers divide by nothing: stages and chunks are uneven."""
    question, cluster = _question(gpus=8), _cluster(8)
    space = legal_space(question)
    sample = space.take(np.random.default_rng(5).choice(len(space), 60, replace=False))
    seconds = formula_seconds(question, sample, cluster)
    for place, layout in enumerate(sample.layouts()):
        case = question.case(layout)
        one = estimate(case, price(case, cluster), cluster.device.peak_tflops)
        assert seconds[place] == pytest.approx(one.step_s, rel=1e-9), layout


def test_the_first_is_about_as_fast_as_the_fastest_of_all_simulated() -> None:
    question, cluster = _question(limits=FEW), _cluster()
    space = legal_space(question)
    assert 50 < len(space) < 400
    every = [judge(question, cluster, layout) for layout in space.layouts()]
    fastest = min(one.step_s for one in every if one.most_bytes <= usable_bytes(cluster.device))
    found = find(question, cluster, top=3)
    assert found.num_legal == len(space)
    assert found.ranked[0].step_s <= 1.01 * fastest
    assert found.ranked[0].simulated


def test_what_does_not_fit_is_never_shown_and_what_fits_is_counted() -> None:
    question, cluster = _question("training.seq_len=32768", limits=FEW), _cluster()
    found = find(question, cluster, top=50)
    limit = usable_bytes(cluster.device)
    space = legal_space(question)
    assert found.num_fit == int((most_bytes(question, space) <= limit).sum()) < len(space)
    assert all(one.most_bytes <= limit for one in found.ranked)


class Fixed(Scale):
    """The same effects on every layout."""

    def __init__(self, effects: Effects, *, known: bool = False) -> None:
        super().__init__(conflicts=known)
        object.__setattr__(self, "effects", effects)

    def of(self, case: Case, cluster: Cluster) -> Effects:
        found: Effects = self.__dict__["effects"]
        return found

    of_network = of


def test_effects_are_of_the_finalists_and_slow_them() -> None:
    question, cluster = _question(limits=FEW), _cluster()
    ideal = find(question, cluster)
    slow = find(question, cluster, scale=Fixed(Effects(compute_factor=1.1, fixed_s=0.5)))
    first, same = slow.ranked[0], ideal.ranked[0]
    assert first.parts["fixed"] == 0.5
    assert first.step_s > 0.5 + 1.05 * same.step_s
    assert first.estimate_s == pytest.approx(same.estimate_s, rel=0.02), "the formula is ideal"


def test_what_a_scale_counts() -> None:
    question, cluster = _question(gpus=16), load_cluster("paper", 16)
    layout = Layout(tensor=2, pipeline=2, data=4)
    case = question.case(layout)
    usual, conflicts, ideal = Scale(), Scale(conflicts=True), Scale(ideal=True)
    assert ideal.of(case, cluster) == NO_EFFECTS
    assert usual.of(case, cluster).fixed_s == cluster.fixed_s > 0
    assert usual.of(case, cluster).compute_factor > 1
    assert usual.of(case, cluster).network_share == NetworkShare()
    assert usual.of_network(case, cluster) == NO_EFFECTS
    assert conflicts.of_network(case, cluster).compute_factor == 1
    assert "no conflicts in the network (--conflicts)" in usual.told(case, cluster)
    assert "fitted: on Table 2" in usual.told(case, cluster)
    assert "--conflicts" not in conflicts.told(case, cluster)
    assert "an ideal cluster" in ideal.told(case, cluster)
    one = load_cluster("paper", 8)
    assert usual.of(question.case(Layout(data=8)), one) == NO_EFFECTS
    assert usual.told(question.case(Layout(data=8)), one) == "one node: no effects of scale"


def _in_order(question: Question, cluster: Cluster) -> tuple[Space, Integers]:
    space = legal_space(question)
    return space, np.argsort(formula_seconds(question, space, cluster), kind="stable")


def test_candidates_are_of_different_kinds_in_the_formulas_order() -> None:
    space, order = _in_order(_question(gpus=8), _cluster(8))
    chosen = candidates(space, order, num_groups=5)
    assert len(chosen) == NUM_CANDIDATES
    assert len({kind_of(layout) for layout in chosen}) == NUM_CANDIDATES
    assert chosen[0] == space.layout(int(order[0]))
    groups = [group_of(layout) for layout in chosen]
    assert max(groups.count(group) for group in groups) == 4
    places = {layout: place for place, layout in enumerate(space.layouts())}
    ranks = [int(np.flatnonzero(order == places[layout])[0]) for layout in chosen]
    assert ranks == sorted(ranks)


def test_finalists_fit_are_as_many_groups_as_wanted_and_short_enough() -> None:
    layouts = [
        Layout(tensor=t, pipeline=p, data=8 // (t * p), join_weight_gradients=join)
        for t, p in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2))
        for join in (1, 2, 3, 4, 5)
    ]

    def chosen(num_groups: int, most: int = 100, fits: bool | None = None) -> list[Layout]:
        return finalists(
            layouts,
            num_groups=num_groups,
            most_computes=most,
            computes_of=lambda _layout: 10,
            fits=lambda layout: fits is None or layout.tensor == 1,
        )

    few, wide = chosen(5), chosen(7)
    assert len(few) == 20
    assert [group_of(one) for one in few[:5]].count(group_of(few[0])) == 4
    assert len({group_of(one) for one in wide}) == 7
    assert {one.tensor for one in chosen(5, fits=False)} == {1}
    assert len(chosen(5, most=10)) == 2, "all of them: twice the most of one"


def test_computes_of_a_schedule() -> None:
    layout = Layout(pipeline=4, virtual=3, schedule="interleaved_1f1b")
    assert num_computes(layout, 8) == 2 * 12 * 8
    halves = Layout(pipeline=4, virtual=3, schedule="interleaved_zb")
    assert num_computes(halves, 8) == 3 * 12 * 8


def test_a_schedule_that_is_too_long_is_left_to_the_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question, cluster = _question(limits=FEW), _cluster()
    monkeypatch.setattr("megascale.plan.search.find._MOST_COMPUTES", 10)
    long = judge(question, cluster, Layout(pipeline=4, micro_batch_size=1))
    assert not long.simulated
    assert long.step_s == pytest.approx(long.estimate_s)
    assert sum(long.parts.values()) == pytest.approx(long.step_s)


def test_a_network_that_is_shared_changes_who_is_looked_at() -> None:
    """With a hundredth of the bandwidth for gradients a pipeline crosses the nodes instead."""
    question, cluster = _question(gpus=16, limits=FEW), _cluster(16)
    slow = Effects(network_share=NetworkShare(data=0.01))
    plain = find(question, cluster)
    blind = find(question, cluster, scale=Fixed(slow))
    shared = find(question, cluster, scale=Fixed(slow, known=True))
    assert plain.ranked[0].layout.pipeline == 1
    assert shared.ranked[0].layout.pipeline > 1
    assert shared.ranked[0].step_s <= blind.ranked[0].step_s


def test_sweeps_are_the_best_of_each_value() -> None:
    question, cluster = _question(limits=FEW), _cluster()
    space = legal_space(question)
    seconds = formula_seconds(question, space, cluster)
    sweep = sweep_of(space, seconds, "tensor", "tensor parallel size")
    assert sweep.values == (1, 2, 4)
    for value, best in zip(sweep.values, sweep.step_s, strict=True):
        assert best == min(
            one for one, layout in zip(seconds, space.layouts(), strict=True)
            if layout.tensor == value
        )  # fmt: skip


def test_layouts_that_the_asked_for_operators_refuse_are_left_out() -> None:
    fused = legal_space(_question("parallelism.flux=fused"))
    assert set(fused.tensor[fused.tensor > 1]) == {4}, "tensor parallelism alone"
    assert (fused.tensor == 1).any()
    reserved = legal_space(_question("parallelism.flux=fused", "parallelism.flux_reserve_sms=16"))
    assert set(reserved.tensor) == {1, 2, 4}


def test_operators_take_the_form_that_the_trainer_takes() -> None:
    question = _question()
    assert question.software_of(Layout(tensor=4)).tensor_overlap == "fused"
    assert question.software_of(Layout(tensor=2, data=2)).tensor_overlap == "chunked"
    reference = _question("parallelism.flux=reference")
    assert reference.software_of(Layout(tensor=2, data=2)).tensor_overlap == "backward"


def test_uneven_nodes_and_unknown_vocabularies_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 devices are not whole nodes of 8"):
        legal_space(_question(gpus=12))
    with pytest.raises(ConfigError, match=r"model\.vocab_size is not known"):
        _question("model.preset=null")
