"""Who holds a job up: planted hangs of every layout and kind, and some that really happened."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.hang import (
    RankView,
    covering_group,
    localise,
    mesh_groups,
    stacks_wanted,
)
from megascale.topology import Mesh
from tests.telemetry.diagnose.planted import KINDS, LARGE, LAYOUTS, SKIPS, Hang, plant
from tests.telemetry.diagnose.planted_large import MEDIUM, enlarged

REAL: dict[str, Any] = json.loads((Path(__file__).parent / "real_hangs.json").read_text())
"""Pages, process states and stacks of four ranks on gloo that were made to hang: asleep in a norm,
holding the GIL there, stopped, or leaving out one sum over the world, one collective of their
tensor group, or one send to the next stage."""

PHASES = ("data_wait", "forward", "backward", "grad_sync", "optimizer", "send", "recv")
HARD = ("stop", "dead", "silent")
CASES = [
    (layout, kind)
    for layout in LAYOUTS
    for kind in KINDS
    if kind != "unsent" or LAYOUTS[layout].mesh.pipeline > 1
]


def _ask(hang: Hang) -> list[Finding]:
    """As the driver does: by the pages; with the stacks wanted; with all."""
    found = [localise(hang.views, hang.groups)]
    for wanted in (stacks_wanted(found[0], hang.groups), range(len(hang.groups["world"][0]))):
        if not found[-1].certain:
            found.append(localise(hang.views, hang.groups, hang.stacks(wanted)))
    return found


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_exactly_the_guilty_ranks(layout: str, kind: str) -> None:
    _check_seeds(layout, kind, range(3))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_exactly_the_guilty_ranks_of_many(layout: str, kind: str) -> None:
    _check_seeds(layout, kind, range(3, 9 if kind in SKIPS else 5))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_exactly_the_guilty_ranks_of_very_many(layout: str, kind: str) -> None:
    _check_seeds(layout, kind, range(5, 100))


def _check_seeds(layout: str, kind: str, seeds: range) -> None:
    for seed in seeds:
        hang = plant(LAYOUTS[layout], kind, seed)
        found = _ask(hang)
        assert found[-1].ranks == hang.guilty, (seed, found)
        assert found[-1].kind == "hang"
        assert found[0].certain or kind not in HARD, seed


@pytest.mark.parametrize("phase", PHASES)
def test_a_stopped_rank_is_found_in_every_phase(phase: str) -> None:
    layout = "pp4-dp2" if phase in ("send", "recv") else "tp2-pp2-dp2"
    for seed in range(5):
        hang = plant(LAYOUTS[layout], "stop", seed, phase=phase)
        finding = localise(hang.views, hang.groups)
        assert (finding.ranks, finding.certain) == (hang.guilty, True)
        (why,) = finding.evidence["why"].values()
        assert why == "stopped"


FEW_OR_MANY = pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(6), id="few", marks=pytest.mark.full),
        pytest.param(range(6, 60), id="many", marks=pytest.mark.slow),
    ],
)


@FEW_OR_MANY
@pytest.mark.parametrize("kind", ["stop", "skip", "unsent"])
def test_pages_alone_are_never_certain_and_wrong(kind: str, seeds: range) -> None:
    """Without the state of the process, which gives a stopped one away."""
    certain = 0
    for layout in [LAYOUTS[name] for name, of in CASES if of == kind]:
        for seed in seeds:
            hang = plant(layout, kind, seed)
            views = {rank: replace(view, os_state=None) for rank, view in hang.views.items()}
            finding = localise(views, hang.groups)
            assert not finding.certain or finding.ranks == hang.guilty, (layout, seed)
            certain += finding.certain
    assert certain > 2 * len(seeds) or kind in SKIPS  # of 10 each


@FEW_OR_MANY
@pytest.mark.parametrize("kind", ["skip", "unsent", "asleep", "gil"])
def test_stacks_of_a_part_are_never_certain_and_wrong(kind: str, seeds: range) -> None:
    """Nodes' dumps come one after the other, and what is certain is acted on at once."""
    certain = 0
    for name in {layout for layout, of in CASES if of == kind}:
        for seed in seeds:
            hang = plant(LAYOUTS[name], kind, seed)
            part = [r for r in range(len(hang.groups["world"][0])) if (r + seed // 2) // 2 % 2]
            finding = localise(hang.views, hang.groups, hang.stacks(part))
            assert not finding.certain or finding.ranks == hang.guilty, (name, seed, finding)
            certain += finding.certain
    assert certain > len(seeds) / 3


@pytest.mark.parametrize("name", REAL)
def test_hangs_that_happened(name: str) -> None:
    case = REAL[name]
    groups = mesh_groups(Mesh(case["tensor"], case["data"], case["pipeline"]))
    views, stacks = {}, {}
    for rank, seen in enumerate(case["ranks"]):
        fields = {key: value for key, value in seen.items() if key != "stack"}
        views[rank] = RankView(epoch=3, **fields)
        stacks[rank] = "\n".join(f"    {frame}" for frame in seen["stack"])
    finding = localise(views, groups, stacks)
    assert (list(finding.ranks), finding.certain) == (case["guilty"], True), finding
    if "stop" in name:  # the pages and the others' stacks show it as well
        blind = {rank: replace(view, os_state=None) for rank, view in views.items()}
        assert list(localise(blind, groups, stacks).ranks) == case["guilty"]


def test_a_page_of_an_earlier_epoch_is_silence() -> None:
    hang = plant(LAYOUTS["dp8"], "asleep", 0)
    views = {**hang.views, 5: replace(hang.views[5], epoch=3)}
    finding = localise(views, hang.groups)
    assert finding.ranks == (5,)
    assert finding.evidence["why"] == {"5": "silent in epoch 4"}


def test_silence_of_everybody_is_not_certain() -> None:
    finding = localise({}, mesh_groups(Mesh(2, 1, 1)))
    assert (finding.ranks, finding.certain, finding.step) == ((0, 1), False, None)


def test_flight_recorders_name_who_counts_less() -> None:
    """The state that gloo reports is of no use, the numbers are."""
    hang = plant(LAYOUTS["tp8"], "skip", 3)
    views = {
        rank: replace(
            RankView(epoch=4, step=9, phase="backward", group_id=view.group_id, os_state="S"),
            recorded={"tensor": 80 - (rank == 6)},
        )
        for rank, view in hang.views.items()
    }
    assert localise(views, hang.groups).ranks == (6,)


def test_ranks_that_all_stand_alike_are_nobodys_fault() -> None:
    groups = mesh_groups(Mesh(2, 2, 2))
    views = {rank: RankView(epoch=1, step=7, phase="optimizer", os_state="S") for rank in range(8)}
    finding = localise(views, groups)
    assert (finding.ranks, finding.certain, finding.group) == ((), False, None)
    assert stacks_wanted(finding, groups) == tuple(range(8))


def test_the_group_is_the_smallest_that_covers() -> None:
    groups = mesh_groups(Mesh(2, 4, 2))
    assert covering_group((3,), groups) == "tensor"
    assert covering_group((2, 3), groups) == "tensor"
    assert covering_group((1, 5), groups) == "data"
    assert covering_group((1, 9), groups) == "pipeline"
    assert covering_group((0, 9), groups) == "vocabulary"
    assert covering_group((0, 15), groups) == "world"
    assert covering_group((), groups) is None


@pytest.mark.full
@pytest.mark.parametrize("kind", ["skip", "unsent", "two asleep", "dead"])
def test_twelve_thousand_ranks(kind: str) -> None:
    _check_large(enlarged(plant(MEDIUM, kind, KINDS.index(kind))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_twelve_thousand_simulated_ranks(kind: str) -> None:
    _check_large(plant(LARGE, kind, KINDS.index(kind)))


def _check_large(hang: Hang) -> None:
    assert len(hang.groups["world"][0]) == 12_288
    since_s = time.process_time()
    found = _ask(hang)
    assert found[-1].ranks == hang.guilty, found
    assert time.process_time() - since_s <= 3
