"""Orders of nodes: against all possible ones where they can be counted, and by hand."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.crossing import RingAxis
from megascale.plan.effects.ecmp import slowest_flow
from megascale.plan.placement.rank_map import ABOVE, RankMap, Traffic, rank_map, traffic_of
from megascale.plan.placement.topology import Switch, Topology
from megascale.topology import Mesh

Bytes = dict[RingAxis, float]

DATA_HEAVY: Bytes = {"data": 10.0, "pipeline": 1.0}
PIPELINE_HEAVY: Bytes = {"data": 1.0, "pipeline": 10.0}


def _topology(sizes: Sequence[int], rails: int = 1) -> Topology:
    """Switch a has nodes a0, a1, ..."""
    return Topology(
        tuple(
            Switch(chr(97 + i), tuple(f"{chr(97 + i)}{j}" for j in range(size)))
            for i, size in enumerate(sizes)
        ),
        rails=rails,
    )


def _rows(found: RankMap, mesh: Mesh) -> list[str]:
    """The switches of each stage's nodes."""
    row = mesh.data
    switches = [node[0] for node in found.order]
    return ["".join(switches[i : i + row]) for i in range(0, len(switches), row)]


def test_data_rings_are_kept_under_a_switch() -> None:
    mesh = Mesh(tensor=8, data=4, pipeline=2)
    mixed = ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    found = rank_map(_topology([4, 4]), mesh, 8, nodes=mixed, num_bytes=DATA_HEAVY)
    assert _rows(found, mesh) == ["aaaa", "bbbb"]
    assert found.before.crossing == {"data": 1.0, "pipeline": 0.0}
    assert found.after.crossing == {"data": 0.0, "pipeline": 1.0}
    assert found.after.share["data"].value == 1.0 > found.before.share["data"].value


def test_pipelines_are_kept_where_they_are_heavier() -> None:
    mesh = Mesh(tensor=8, data=4, pipeline=2)
    found = rank_map(_topology([4, 4]), mesh, 8, num_bytes=PIPELINE_HEAVY)
    assert found.after.crossing["pipeline"] == 0.0
    assert sorted(_rows(found, mesh)) == ["aabb", "aabb"]


def test_uneven_switches_keep_whole_rings_where_they_fit() -> None:
    """Rows of four on switches of 5, 3 and 4: two whole, the third of what is left."""
    mesh = Mesh(tensor=8, data=4, pipeline=3)
    found = rank_map(_topology([5, 3, 4]), mesh, 8, num_bytes=DATA_HEAVY)
    rows = _rows(found, mesh)
    assert sorted(map(sorted, rows)) == [list("aaaa"), list("abbb"), list("cccc")]


@pytest.mark.parametrize("num_bytes", [DATA_HEAVY, PIPELINE_HEAVY, {"data": 1.0, "pipeline": 1.0}])
@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ((3, 3), Mesh(8, 3, 2)),
        ((4, 2), Mesh(8, 2, 3)),
        ((2, 2, 2), Mesh(8, 3, 2)),
        ((5, 1, 2), Mesh(8, 4, 2)),
        ((4, 4), Mesh(8, 2, 4)),
        ((3, 5), Mesh(8, 8, 1)),
    ],
)
def test_no_order_is_much_cheaper(sizes: tuple[int, ...], mesh: Mesh, num_bytes: Bytes) -> None:
    """All ways to lay switches over the places, counted."""
    topology = _topology(sizes)
    found = rank_map(topology, mesh, 8, num_bytes=num_bytes)
    names = {switch.name: switch.nodes for switch in topology.switches}
    letters = "".join(name * len(nodes) for name, nodes in names.items())
    best = min(
        _cost(traffic_of(_named(order, names), topology, mesh, 8, num_bytes), num_bytes)
        for order in set(itertools.permutations(letters))
    )
    assert _cost(found.after, num_bytes) <= best * 1.02


def _cost(traffic: Traffic, num_bytes: Bytes) -> float:
    return sum(
        num_bytes[axis]
        * (1 / traffic.share[axis].value + ABOVE * (traffic.crossing[axis] + traffic.cut[axis]))
        for axis in traffic.share
    )


def _named(order: Sequence[str], names: dict[str, tuple[str, ...]]) -> list[str]:
    heads = {name: iter(nodes) for name, nodes in names.items()}
    return [next(heads[letter]) for letter in order]


def test_the_papers_fabric() -> None:
    """2,048 GPUs, 64 servers a set of eight rails: in a shuffled order all 64 nodes of a set send
    to others; by topology rings of 32 lie whole under a set, and two stages beside each other."""
    topology, mesh = _topology([64, 64, 64, 64], rails=8), Mesh(8, 32, 8)
    nodes = topology.nodes
    random.Random(1).shuffle(nodes)
    found = rank_map(topology, mesh, 8, nodes=nodes, num_bytes=DATA_HEAVY)
    assert found.after.crossing["data"] == 0.0
    assert found.after.crossing["pipeline"] == pytest.approx(0.5)
    assert found.after.share["pipeline"] == slowest_flow(topology.uplinks, {32: 4 * 8})
    assert found.before.share["data"].value < 0.35
    assert found.after.cut == {"data": 0.0, "pipeline": 1.0}
    assert found.gain > 2.5
    assert "data: 0% of the groups and 0% of their edges leave a switch" in str(found)


def test_the_same_file_gives_the_same_order() -> None:
    topology, mesh = _topology([5, 3, 4]), Mesh(8, 4, 3)
    orders = {rank_map(topology, mesh, 8, nodes=nodes).order for nodes in _shuffles(topology.nodes)}
    assert len(orders) == 1


def _shuffles(nodes: list[str]) -> list[list[str]]:
    return [random.Random(seed).sample(nodes, len(nodes)) for seed in range(5)]


def test_more_nodes_than_needed_are_chosen_from() -> None:
    """Four of six: those of the switch that holds four."""
    found = rank_map(_topology([2, 4]), Mesh(8, 4, 1), 8)
    assert found.order == ("b0", "b1", "b2", "b3")


def test_the_first_node_is_kept_first() -> None:
    mesh = Mesh(8, 4, 2)
    found = rank_map(_topology([4, 4]), mesh, 8, first="b2", num_bytes=DATA_HEAVY)
    assert found.order[0] == "b2"
    assert _rows(found, mesh) == ["bbbb", "aaaa"]
    assert len(set(found.order)) == 8
    uneven = rank_map(_topology([4, 2, 2]), mesh, 8, first="b1", num_bytes=DATA_HEAVY)
    assert uneven.order[0] == "b1"
    assert len(set(uneven.order)) == 8
    with pytest.raises(ConfigError, match="the first node is to be c1, which is none of the job's"):
        rank_map(_topology([4, 4]), mesh, 8, first="c1")


def test_several_stages_a_node_and_single_nodes() -> None:
    found = rank_map(_topology([2, 2]), Mesh(2, 2, 8), 8, nodes=["a0", "b0", "a1", "b1"])
    assert found.order in {("a0", "a1", "b0", "b1"), ("b0", "b1", "a0", "a1")}
    assert rank_map(_topology([1]), Mesh(2, 2, 2), 8).order == ("a0",)
    alone = rank_map(_topology([3]), Mesh(8, 3, 1), 8)
    assert alone.before == alone.after
    assert alone.order == ("a0", "a1", "a2")


def test_pods_are_kept_together() -> None:
    """Switches of two pods in turn; two stages on two switches each: a pod a stage."""
    switches = [Switch(f"s{i}", (f"s{i}n0", f"s{i}n1"), f"p{i % 2}") for i in range(4)]
    found = rank_map(Topology(tuple(switches)), Mesh(8, 4, 2), 8, num_bytes=DATA_HEAVY)
    pods = [int(node[1]) % 2 for node in found.order]
    assert pods in ([0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("mesh", "per_node", "words"),
    [
        (Mesh(8, 9, 1), 8, "72 ranks on nodes of 8 need 9 nodes, there are 8: 1 missing"),
        (Mesh(8, 9, 1), 10, "72 ranks do not fill nodes of 10; nearest legal: 70 or 80 ranks"),
        (Mesh(8, 1, 1), 0, "devices_per_node is 0; legal is 1 or more"),
    ],
)
def test_bad_input(mesh: Mesh, per_node: int, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        rank_map(_topology([4, 4]), mesh, per_node)
