"""A bad node is told from its partners: all single and double faults of 4 to 8 nodes."""

from __future__ import annotations

import threading
import time
from itertools import combinations

import pytest

from megascale.cluster.selfcheck.check import Check
from megascale.cluster.selfcheck.pairs import (
    Meeting,
    accuse,
    meetings,
    parse_meeting,
    rounds,
    unexplained,
)
from megascale.cluster.selfcheck.together import hold_meetings
from megascale.env import free_port
from megascale.errors import ConfigError


def names(count: int) -> list[str]:
    return [f"node{number}" for number in range(count)]


def results(planned: list[list[tuple[str, str]]], bad: set[str]) -> dict[tuple[str, str], bool]:
    return {pair: not bad.intersection(pair) for pairs in planned for pair in pairs}


@pytest.mark.parametrize("count", range(4, 9))
@pytest.mark.parametrize("faults", [0, 1, 2])
def test_exactly_the_bad_nodes_are_accused(count: int, faults: int) -> None:
    nodes = names(count)
    planned = rounds(nodes, most_faults=2)
    for bad in combinations(nodes, faults):
        assert accuse(results(planned, set(bad))) == set(bad)


@pytest.mark.parametrize("count", range(3, 9))
def test_two_or_three_rounds_find_one_bad_node(count: int) -> None:
    planned = rounds(names(count))
    assert len(planned) == (2 if count % 2 == 0 else 3)
    for bad in names(count):
        assert accuse(results(planned, {bad})) == {bad}


def test_fewer_rounds_would_not_do() -> None:
    planned = rounds(names(4), most_faults=2)[:2]
    assert accuse(results(planned, {"node0", "node2"})) != {"node0", "node2"}
    assert accuse(results(rounds(names(4))[:1], {"node0"})) == {"node0", "node1"}


@pytest.mark.parametrize("count", range(2, 13))
def test_neighbours_first_then_swapped_and_nobody_meets_twice(count: int) -> None:
    nodes = names(count)
    planned = rounds(nodes, most_faults=count)
    for pairs in planned:
        seen = [node for pair in pairs for node in pair]
        assert len(seen) == len(set(seen)) >= count - 1
    met = [frozenset(pair) for pairs in planned for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2  # everybody met everybody
    assert planned[0] == [(nodes[i], nodes[i + 1]) for i in range(0, count - 1, 2)]
    if count > 2:
        swapped = {frozenset((nodes[i], nodes[i + 1])) for i in range(1, count - 1, 2)}
        assert swapped <= {frozenset(pair) for pair in planned[1]}


def test_odd_places() -> None:
    assert rounds([]) == rounds(["a"]) == []
    assert rounds(["a", "b"], 2) == [[("a", "b")]]
    with pytest.raises(ValueError, match="named twice"):
        rounds(["a", "a"])


def test_a_bad_path_accuses_nobody_and_is_named() -> None:
    seen = {("a", "b"): False, ("b", "c"): True, ("c", "d"): True, ("a", "d"): True}
    assert accuse(seen) == set()
    assert unexplained(seen) == {("a", "b")}
    assert unexplained({**seen, ("a", "d"): False}) == set()


def test_meetings_have_two_ends_and_survive_their_text() -> None:
    nodes = names(5)
    planned = meetings(rounds(nodes, 2), {name: f"10.0.0.{i}" for i, name in enumerate(nodes)})
    ends: dict[tuple[str, int], list[tuple[str, Meeting]]] = {}
    for node, held in planned.items():
        assert [m.port for m in held] == sorted({m.port for m in held})  # in order of rounds
        for meeting in held:
            assert parse_meeting(str(meeting)) == meeting
            ends.setdefault((meeting.host, meeting.port), []).append((node, meeting))
    for (host, _), ((one, first), (other, second)) in ends.items():
        assert (first.peer, second.peer) == (other, one)
        assert {first.rank, second.rank} == {0, 1}
        listener = one if first.rank == 0 else other
        assert host == f"10.0.0.{listener[-1]}"


@pytest.mark.parametrize("text", ["b", "b@h:1", "b@h:0/1", "b@h:70000/1", "b@h:1/2", "b h@h:1/1"])
def test_what_is_no_meeting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected PEER@HOST:PORT/RANK"):
        parse_meeting(text)


def test_two_ends_meet_over_tcp() -> None:
    port = free_port()
    found: dict[int, list[Check]] = {}

    def hold(rank: int) -> None:
        ends = [Meeting(f"node{1 - rank}", "127.0.0.1", port, rank)]
        found[rank] = hold_meetings(ends, time.monotonic() + 80.0, {})

    ends = [threading.Thread(target=hold, args=(rank,)) for rank in range(2)]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    for rank in range(2):
        (check,) = found[rank]
        assert check.ok, check.reason
        assert check.name == f"neighbours:node{1 - rank}"
        assert check.value is not None
        assert check.value > 0.001


def test_who_comes_to_nobody_waits_no_longer_than_the_deadline() -> None:
    start = time.monotonic()
    ends = [Meeting(name, "127.0.0.1", free_port(), 1) for name in ("gone", "late")]
    first, second = hold_meetings(ends, start + 6.0, {})
    assert time.monotonic() - start < 6.0 + 1.5
    assert first.ok is second.ok is False
    assert second.seconds > 1.2 * first.seconds  # twice the time, in which the start counts too
