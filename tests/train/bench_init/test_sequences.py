"""The simulated ranks make the calls that torch makes: against recordings of torch itself."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.parallel.groups import create_groups
from megascale.parallel.transfers import channels_in_order
from megascale.topology import Mesh
from megascale.train.bench_init.calls import Mark, Pause, Request, Steps
from megascale.train.bench_init.sequences import (
    EveryGroup,
    OwnGroups,
    megatron_groups,
    own_channels,
    own_groups_of,
)
from tests.distributed import run_ranks

PAPER = Mesh(tensor=8, data=32, pipeline=8)
Call = tuple[str, str]


class Shared:
    """A store in memory for ranks that are stepped in turn; records every rank's calls."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: dict[int, list[Call]] = {}

    def of(self, rank: int) -> OnShared:
        return OnShared(self, self.calls.setdefault(rank, []))


class OnShared:
    """Calls of one rank; a request is a look at the memory, and one that waits is asked again."""

    def __init__(self, shared: Shared, calls: list[Call]) -> None:
        self._values, self._calls = shared.values, calls

    def join(self, rank: int, world_size: int) -> Steps:
        yield Mark("asked")

    def add(self, key: str, amount: int) -> Steps:
        self._calls.append(("add", key))
        yield Mark("asked")
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % value
        return value

    def set(self, key: str, value: bytes) -> Steps:
        self._calls.append(("set", key))
        yield Mark("asked")
        self._values[key] = value

    def get(self, key: str) -> Steps:
        self._calls.append(("get", key))
        yield from self._until_there(key)
        return self._values[key]

    def multi_get(self, keys: tuple[str, ...]) -> Steps:
        self._calls.append(("multi_get", keys[0]))
        for key in keys:
            yield from self._until_there(key)
        return [self._values[key] for key in keys]

    def wait(self, key: str) -> Steps:
        self._calls.append(("wait", key))
        yield from self._until_there(key)

    def _until_there(self, key: str) -> Steps:
        while key not in self._values:
            yield Pause(0.0)


def played(sequence: EveryGroup | OwnGroups) -> dict[int, list[Call]]:
    """The calls of every rank, where all take turns; fails where nobody can go on."""
    shared = Shared()
    ranks = range(sequence.mesh.world_size)
    left = deque(sequence.steps(shared.of(rank), rank) for rank in ranks)
    idle = 0
    while left:
        steps = left.popleft()
        try:
            step = steps.send(None)
        except StopIteration:
            idle = 0
            continue
        assert not isinstance(step, Request)
        idle = idle + 1 if isinstance(step, Pause) else 0
        assert idle <= 2 * len(left) + 2, "every rank waits"
        left.append(steps)
    return shared.calls


# ------------------------------------------------------------ torch's own calls


class Recording(dist.Store):
    """Passes calls on and keeps their names and keys."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._inner = inner

    def _on(self, name: str, key: str, *arguments: Any) -> Any:
        self.calls.append((name, key))
        return getattr(self._inner, name)(*arguments)

    def set(self, key: str, value: Any) -> None:
        self._on("set", key, key, value)

    def get(self, key: str) -> bytes:
        return self._on("get", key, key)

    def add(self, key: str, amount: int) -> int:
        return self._on("add", key, key, amount)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._on("wait", keys[0], keys, *timeout)


def _recorded(
    rank: int, world_size: int, path: str, create: Callable[[], None], lazy: bool
) -> list[Call]:
    dist.destroy_process_group()
    os.environ["TORCH_DIST_INIT_BARRIER"] = "0" if lazy else "1"
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    store = Recording(dist.FileStore(path, world_size))
    _ALIVE.append(store)  # torch holds its C++ half
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    create()
    return list(store.calls)


_ALIVE: list[dist.Store] = []
SMALL = Mesh(tensor=2, data=1, pipeline=2)


def _all_of_megatrons() -> None:
    for ranks in megatron_groups(SMALL):
        dist.new_group(ranks)


def _ring() -> None:
    dist.all_reduce(torch.ones(1))


def barriers(calls: list[Call]) -> list[str]:
    return [name for name, key in calls if "store_based_barrier_key" in key]


def without_setting(calls: list[str]) -> list[str]:
    """Who is last sets a key more, and that is another rank each time."""
    return [name for name in calls if name != "set"]


def test_a_barrier_is_torchs(tmp_path: Any) -> None:
    store = str(tmp_path / "store")
    recorded = run_ranks(_recorded, 4, store, _all_of_megatrons, False)
    simulated = played(EveryGroup(SMALL, "wait"))
    for rank, calls in enumerate(recorded):
        told = without_setting(barriers(calls))
        assert told == without_setting(barriers(simulated[rank]))
        assert told[:3] == ["add", "add", "wait"]
    num_barriers = len(megatron_groups(SMALL)) + 1
    for ranks in (recorded, list(simulated.values())):
        sets = Counter(chain.from_iterable(barriers(calls) for calls in ranks))["set"]
        assert sets >= num_barriers, "the last of every barrier sets its key"


def test_a_lazily_connected_group_is_gloos(tmp_path: Any) -> None:
    store = str(tmp_path / "store")
    recorded = run_ranks(_recorded, 4, store, _ring, True)
    simulated = played(OwnGroups(Mesh(data=4)))
    for rank, calls in enumerate(recorded):
        control = [name for name, key in simulated[rank] if "control0" in key]
        assert [name for name, _ in calls] == control == ["set", "wait", "get", "wait", "get"]


# ------------------------------------------------------------ which groups


def test_the_groups_of_megatron() -> None:
    groups = megatron_groups(PAPER)
    sizes = Counter(len(ranks) for ranks in groups)
    # data; model; tensor and pipeline; embeddings; position embeddings
    assert sizes == {32: 64, 64: 32, 8: 256 + 256, 2: 256, 1: 256}
    assert len(groups) == 1_120
    assert groups[0] == list(range(0, 256, 8))


@pytest.mark.parametrize(
    "mesh", [Mesh(2, 3, 4), Mesh(2, 2, 1), Mesh(1, 2, 2), Mesh(8, 1, 2)], ids=str
)
def test_own_groups_are_those_of_training(mesh: Mesh) -> None:
    expected = {axis: mesh.groups(axis) for axis in ("tensor", "data", "pipeline")}
    expected["embedding"] = mesh.embedding_groups()
    for rank in range(mesh.world_size):
        own = {
            name: next(ranks for ranks in groups if rank in ranks)
            for name, groups in expected.items()
            if any(rank in ranks and len(ranks) > 1 for ranks in groups)
        }
        assert dict(own_groups_of(mesh, rank)) == own


def _names(_rank: int, _world_size: int) -> list[str]:
    groups = create_groups(Mesh(2, 2, 2), tied_embeddings=True, timeout_s=30.0)
    return list(groups.creation_s)


def test_the_order_is_that_of_training() -> None:
    for rank, names in enumerate(run_ranks(_names, 8)):
        assert [name for name, _ in own_groups_of(Mesh(2, 2, 2), rank)] == names


@pytest.mark.parametrize(
    "mesh", [Mesh(2, 1, 4), Mesh(1, 2, 3), Mesh(2, 1, 2), Mesh(2, 2, 1)], ids=str
)
def test_channels_are_those_of_training(mesh: Mesh) -> None:
    made = channels_in_order(mesh, wrap=True) if mesh.pipeline > 1 else []
    for rank in range(mesh.world_size):
        expected = sorted(sorted((a, b)) for _, a, b in made if rank in (a, b))
        assert sorted(pair for _, pair in own_channels(mesh, rank)) == expected
    names = Counter((n, *p) for r in range(mesh.world_size) for n, p in own_channels(mesh, r))
    assert set(names.values()) <= {2}, "a channel is one name at its two ends"


# ------------------------------------------------------------ how many calls


@pytest.mark.parametrize("form", ["poll", "wait"])
def test_every_group_ends_and_costs_three_calls_a_rank_and_barrier(form: Any) -> None:
    mesh = Mesh(2, 2, 2)
    calls = played(EveryGroup(mesh, form))
    num_barriers = len(megatron_groups(mesh)) + 1
    for told in calls.values():
        counted = Counter(barriers(told))
        assert counted["add"] >= 2 * num_barriers
        assert counted["wait"] == (num_barriers if form == "wait" else 0)


def test_the_first_groups_alone() -> None:
    mesh = Mesh(2, 2, 2)
    keys = {key for _, key in played(EveryGroup(mesh, "wait", 3))[0] if "barrier" in key}
    assert len(keys) == 2 * (3 + 1)


def test_ordered_creation_costs_a_rank_the_same_at_any_size() -> None:
    """In groups above 128 ranks, of which some have to set an id, one call more."""

    def most_calls(mesh: Mesh) -> int:
        return max(len(calls) for calls in played(OwnGroups(mesh)).values())

    counts = [most_calls(Mesh(2, data, 4)) for data in (2, 4, 16)]
    assert counts[0] == counts[1] == counts[2]
    wide = most_calls(Mesh(2, 20, 4))  # 160 ranks
    assert wide == counts[0] + 1


def test_of_a_large_group_every_member_gets_every_id() -> None:
    calls = played(OwnGroups(Mesh(data=300)))
    world = [[name for name, key in told if "world 0" in key] for told in calls.values()]
    assert [rank for rank, told in enumerate(world) if told == ["set", "multi_get"]] == [
        0,
        128,
        256,
    ]
    assert sum(told == ["multi_get"] for told in world) == 297


def _keys(calls: dict[int, list[Call]]) -> Iterator[str]:
    for told in calls.values():
        yield from (key for name, key in told if name == "set")


def test_no_key_is_set_by_two_ranks() -> None:
    """Else a rank would take another group's id."""
    sets = Counter(_keys(played(OwnGroups(Mesh(2, 2, 4)))))
    assert set(sets.values()) == {1}
