"""How many slots are enough without a barrier: all interleavings, searched.

The claim of `arena.py`: every call waits for every peer, so what a call received stays until the
next call but one begins, and no flag is set twice before it was reset.

Two ranks are the hard case: what two of many ranks do, without the others, is a run of two ranks.
"""

from __future__ import annotations

import pytest

from megascale.flux.arena import NUM_SLOTS
from tests.flux.turns import Call, Model, turns

WORLDS = [(2, 8), (3, 5)]  # ranks, calls


@pytest.mark.parametrize(("world_size", "num_calls"), WORLDS)
def test_three_slots_keep_what_came_until_the_next_call_but_one(
    world_size: int, num_calls: int
) -> None:
    assert NUM_SLOTS >= 4
    model = Model(world_size, turns(num_calls, 3), hold=2)
    assert model.violation() is None
    found = model.holding(3).violation()
    assert found is not None
    assert "overwrites what" in found


@pytest.mark.parametrize(("world_size", "num_calls"), WORLDS)
def test_four_slots_keep_it_for_a_turn_more_without_a_started_gather(
    world_size: int, num_calls: int
) -> None:
    """So a view stays through a next call that takes two turns (the fused all-reduce)."""
    model = Model(world_size, turns(num_calls, NUM_SLOTS), hold=3)
    assert model.violation() is None
    assert model.holding(4).violation() is not None


@pytest.mark.parametrize(("world_size", "num_calls"), WORLDS)
def test_two_slots_keep_it_one_call_less(world_size: int, num_calls: int) -> None:
    model = Model(world_size, turns(num_calls, 2), hold=1)
    assert model.violation() is None
    found = model.holding(2).violation()
    assert found is not None
    assert "still reads of call 0" in found


def test_one_slot_does_not_even_last_for_its_call() -> None:
    found = Model(2, turns(3, 1), hold=0).violation()
    assert found is not None
    assert "overwrites what" in found


STARTED = Call(0, late=1, hold=2)  # an all-gather that is waited for after the next operator
SCATTER = Call(0, hold=0)
GATHER = Call(0, hold=1)  # its gathered input is read by what follows


def _sequence(pattern: list[Call], num_calls: int, num_slots: int) -> list[Call]:
    return [pattern[i % len(pattern)]._replace(slot=i % num_slots) for i in range(num_calls)]


@pytest.mark.parametrize(
    "pattern",
    [[STARTED, SCATTER], [STARTED], [STARTED, SCATTER, SCATTER], [GATHER, STARTED, SCATTER]],
    ids=["column layers", "gathers", "two scatters between", "row and column layers"],
)
def test_started_gathers_need_a_fourth_slot(pattern: list[Call]) -> None:
    """While a gather is under way the next call begins one call too early. In three slots that is
    harmless only if two calls lie between two such gathers: backward of two column-parallel layers
    one after another (query and key, gate and up) has one."""
    assert Model(2, _sequence(pattern, 10, 4)).violation() is None
    three_are_enough = len(pattern) > 2
    found = Model(2, _sequence(pattern, 10, 3)).violation()
    assert (found is None) == three_are_enough, found
    later = [call._replace(late=2 * call.late) for call in pattern]
    assert Model(2, _sequence(later, 10, 3)).violation() is not None


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_peer_without_rows_must_be_waited_for(world_size: int) -> None:
    """If a form skipped peers whose share is empty, ranks would run ahead of them."""
    model = Model(world_size, turns(8, NUM_SLOTS), silent=frozenset([world_size - 1]))
    assert model.violation() is not None


def test_a_replayed_graph_begins_with_a_barrier() -> None:
    """A graph has its turns baked in: 0, 1, 2, 0 and then 0 again. Its barrier releases every slot,
    so the last call before a replay is read until the replay begins and not a call longer."""
    graph = [Call(0), Call(1), Call(2), Call(0)]
    assert Model(2, graph * 2, hold=0).violation() is not None
    guarded = Model(2, [Call(0, barrier=True), *graph[1:]] * 2, hold=1)
    assert guarded.violation() is None
    found = guarded.holding(2).violation()
    assert found is not None
    assert "still reads of call 3" in found


def test_eager_calls_after_a_graph_begin_with_a_barrier() -> None:
    """The host counts the captured turns once, whatever is replayed between eager calls."""
    graph, eager = [Call(0, barrier=True), Call(1)], [Call(2), Call(0)]
    mixed = [*graph, *graph, *eager, *graph, *eager]
    assert Model(2, mixed, hold=1).violation() is None
    # call 5 takes slot 0 and a replay follows at slot 0: its barrier is what lies between them
    bare = [Call(call.slot) for call in mixed]
    assert Model(2, bare, hold=0).violation() is not None
    # an eager call after a replay that ended in its slot
    after = [*graph, Call(1)]
    assert Model(2, after, hold=0).violation() is not None
    after[-1] = Call(1, barrier=True)
    assert Model(2, after, hold=1).violation() is None
