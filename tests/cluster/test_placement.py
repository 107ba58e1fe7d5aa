"""Ranks on nodes by the network's shape: at a job's start, and when spares take ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.actions import Alert, Notify
from megascale.cluster.driver.journal import Journal
from megascale.cluster.transitions import (
    Allocated,
    CheckDone,
    CommandDone,
    NodeJoined,
    Policy,
    RankExited,
)
from megascale.plan.placement.job import JobPlacement
from megascale.plan.placement.topology import Switch, Topology
from tests.cluster.driver.jobs import ByHand, policy

FOUR = {"n0": "a", "n1": "b", "n2": "a", "n3": "b"}  # names and switches alternate


def _policy(nodes: int, topology: Topology | None = None, **changes: Any) -> Policy:
    """Two data-parallel rings of half the nodes each, a pipeline of two stages."""
    placement = JobPlacement(2, tensor=2, pipeline=2, topology=topology)
    return replace(policy(nodes, **changes), placement=placement)


def _begin(chosen: Policy, switch_of: Mapping[str, str | None]) -> ByHand:
    hand = ByHand(chosen)
    hand.go(Allocated(len(switch_of), tuple(switch_of)))
    for name, switch in switch_of.items():
        hand.go(NodeJoined(name, f"i-{name}", f"host-{name}", "127.0.0.1", switch))
        hand.go(CheckDone(name, ok=True))
    return hand


def _placed(hand: ByHand) -> list[str]:
    return [name for _, name in sorted(hand.places().items())]


def _said(hand: ByHand) -> str:
    return " ".join(action.text for action in hand.done if isinstance(action, Notify))


def test_rings_lie_under_the_schedulers_switches() -> None:
    hand = _begin(_policy(4), FOUR)
    assert _placed(hand) == ["n0", "n2", "n1", "n3"]
    assert "ranks are placed by switches" in _said(hand)


def test_the_topology_file_is_preferred_to_the_scheduler() -> None:
    topology = Topology((Switch("x", ("host-n0", "host-n1")), Switch("y", ("host-n2", "host-n3"))))
    hand = _begin(_policy(4, topology), FOUR)
    assert _placed(hand) == ["n0", "n1", "n2", "n3"]


def test_a_host_that_the_file_does_not_have_is_told_and_placed() -> None:
    topology = Topology((Switch("x", ("host-n1", "host-n3")), Switch("y", ("host-n0",))))
    hand = _begin(_policy(4, topology), dict.fromkeys(FOUR))
    assert sorted(_placed(hand)) == ["n0", "n1", "n2", "n3"]
    rings = {frozenset(_placed(hand)[:2]), frozenset(_placed(hand)[2:])}
    assert frozenset({"n1", "n3"}) in rings
    assert "not in cluster.topology: host-n2" in hand.the(Alert).text


@pytest.mark.parametrize("switch", [None, "a"])
def test_where_nothing_tells_hosts_apart_their_names_do(switch: str | None) -> None:
    hand = _begin(_policy(4), dict.fromkeys(["n3", "n10", "n2", "n1"], switch))
    assert _placed(hand) == ["n1", "n2", "n3", "n10"]
    assert "ranks are placed by switches" not in _said(hand)


def test_without_a_placement_hosts_are_grouped_as_before() -> None:
    hand = _begin(replace(_policy(4), placement=None), FOUR)
    assert _placed(hand) == ["n0", "n2", "n1", "n3"]


def test_a_spare_on_the_neighbours_switch_takes_the_ranks() -> None:
    """n3 on b is lost, whose neighbour n1 hangs on b; of two spares the one on b takes its place,
    and everybody else stays."""
    hand = _begin(_policy(4, spares=2), FOUR)
    for name, switch in (("s0", "a"), ("s1", "b")):
        hand.go(Allocated(1, (name,)))
        hand.go(NodeJoined(name, f"i-{name}", f"host-{name}", "127.0.0.1", switch))
        hand.go(CheckDone(name, ok=True))
    before = hand.places()
    hand.steps(5)
    lost = next(rank for rank, name in before.items() if name == "n3")
    hand.go(RankExited(2 * lost, -9, 1))
    for name in FOUR:
        hand.go(CommandDone(name, "stop", 1))
    for name in FOUR:
        hand.go(CheckDone(name, ok=name != "n3", failures=("gemm",) if name == "n3" else ()))
    assert hand.places() == {**before, lost: "s1"}


def test_a_journal_keeps_the_placement(tmp_path: Path) -> None:
    topology = Topology((Switch("x", ("host-n0",), "pod"), Switch("y", ("host-n1",))), rails=8)
    hand = ByHand(_policy(2, topology))
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin(hand.decision, 0.0)
    journal.close()
    restored = Journal(tmp_path / "journal.sqlite").restore()
    assert restored is not None
    assert restored[0].policy == hand.job.policy
