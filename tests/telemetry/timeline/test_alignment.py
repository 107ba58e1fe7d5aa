"""Ranks on one clock: planted offsets of hosts are found, stated with their error, and written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megascale.telemetry.timeline import Drawn, Events, Selection, draw_timeline
from megascale.topology import Mesh
from tests.telemetry.timeline.importer import Imported, import_trace
from tests.telemetry.timeline.world import World

HOUR_NS = 3_600 * 10**9
MESH = Mesh(tensor=2, data=3, pipeline=2)
HOSTS = {rank: f"node{rank // 2}" for rank in range(MESH.world_size)}  # a tensor group a host
NAMES = sorted(set(HOSTS.values()))


def drawn(
    path: Path, clock_ns: dict[str, int], *, align: bool = True, noise_ns: int = 0, seed: int = 0
) -> tuple[Imported, Drawn]:
    generator = random.Random(seed)
    world = World(MESH, micro_batches=4, compute_ns=3_000_000, latency_ns=40_000)
    events = world.events(
        clock_ns=clock_ns,
        hosts=HOSTS,
        noise=lambda: generator.randint(-noise_ns, noise_ns) if noise_ns else 0,
    )
    result = draw_timeline(Events(events), path, align=align)
    return import_trace(path), result


@pytest.mark.parametrize("seed", range(5))
def test_planted_clocks_are_inside_the_stated_error(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    ahead = {name: generator.randint(-8_000_000, 8_000_000) for name in NAMES}
    ahead[NAMES[seed]] += HOUR_NS
    found, result = drawn(tmp_path / "t.json", ahead, noise_ns=20_000, seed=seed)
    assert found.faults == []
    clocks = found.metadata["clocks"]
    assert clocks == result.alignment.as_json()
    assert clocks["unknown_hosts"] == []
    reference = clocks["reference"]
    for name, said in clocks["hosts"].items():
        true_us = (ahead[reference] - ahead[name]) / 1000
        got_us = said["correction_us"] - clocks["hosts"][reference]["correction_us"]
        assert abs(got_us - true_us) <= said["error_us"] + 0.01, (name, got_us, true_us)
        assert said["error_us"] < 3_000
    # all of it lies within one step again, not an hour apart
    assert max(one.end_ns for one in found.slices) < 10**9


def test_without_alignment_an_hour_stays_an_hour(tmp_path: Path) -> None:
    found, result = drawn(tmp_path / "t.json", {"node1": HOUR_NS}, align=False)
    assert max(one.end_ns for one in found.slices) > HOUR_NS
    assert found.metadata["clocks"] == {"aligned": False, "why": "--no-align"}
    assert result.arrows.against_time > 0


def test_alignment_gives_the_arrows_back(tmp_path: Path) -> None:
    straight, _ = drawn(tmp_path / "a.json", {})
    crooked, result = drawn(tmp_path / "b.json", {"node1": HOUR_NS, "node4": -HOUR_NS})
    assert result.arrows.against_time == 0
    assert len(crooked.arrows) == len(straight.arrows) == result.arrows.arrows


def test_one_host_needs_none(tmp_path: Path) -> None:
    events = World(MESH).events(hosts=dict.fromkeys(range(MESH.world_size), "node0"))
    result = draw_timeline(Events(events), tmp_path / "t.json")
    assert str(result.alignment) == "clocks are as they were recorded: all ranks are on one host"


def test_hosts_that_exchange_nothing_are_said(tmp_path: Path) -> None:
    """Of a data group alone, one rank of which recorded no span."""
    events = [
        event
        for event in World(Mesh(1, 3, 1)).events()
        if event.kind == "header" or event.rank != 1
    ]
    result = draw_timeline(Events(events), tmp_path / "t.json")
    assert str(result.alignment).endswith(
        "Nothing in these steps tells the clocks of 1 host, which are as they were recorded: host01"
    )
    alone = draw_timeline(Events(events), tmp_path / "t.json", Selection(ranks=[0, 1]))
    assert "no two hosts exchange anything" in str(alone.alignment)


def test_a_sentence_says_how_good_it_is(tmp_path: Path) -> None:
    _, result = drawn(tmp_path / "t.json", {"node2": HOUR_NS})
    said = str(result.alignment)
    assert said.startswith("clocks of 6 hosts aligned to within ")
    assert "the largest correction is -3600000" in said
    assert said.endswith("of node2")
