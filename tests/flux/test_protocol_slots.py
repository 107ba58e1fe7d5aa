"""Why three slots are enough without a barrier, and two are not: all interleavings, searched.

The claim of `arena.py`: every call waits for every peer, so what a call received stays until the
next call but one begins, and no flag is set twice before it was reset.
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
    model = Model(world_size, turns(num_calls, NUM_SLOTS), hold=2)
    assert model.violation() is None
    found = model.holding(3).violation()
    assert found is not None
    assert "overwrites what" in found


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


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_peer_without_rows_must_be_waited_for(world_size: int) -> None:
    """If a form skipped peers whose share is empty, ranks would run ahead of them."""
    model = Model(world_size, turns(5, NUM_SLOTS), silent=frozenset([world_size - 1]))
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
