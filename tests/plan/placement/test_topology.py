"""Topology files: both of their forms, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.ecmp import Uplinks
from megascale.plan.placement.topology import Switch, Topology, load_topology, topology_of

GOOD = """
rails = 8
uplinks = 32
queue_pairs = 4
[[switch]]
name = "tor-0"
pod = "p0"
nodes = ["gpu[00-02]", "gpu07"]
[[node]]
name = "gpu04"
switch = "tor-1"
[[node]]
name = "gpu03"
switch = "tor-1"
"""


def _load(tmp_path: Path, text: str) -> Topology:
    file = tmp_path / "topology.toml"
    file.write_text(text)
    return load_topology(file)


def test_both_forms(tmp_path: Path) -> None:
    found = _load(tmp_path, GOOD)
    assert found.switches == (
        Switch("tor-0", ("gpu00", "gpu01", "gpu02", "gpu07"), "p0"),
        Switch("tor-1", ("gpu04", "gpu03")),
    )
    assert found.switch_of["gpu03"] == "tor-1"
    assert found.uplinks == Uplinks(32, 400.0, 200.0, 4)


def test_uplinks_by_default_carry_what_comes_up() -> None:
    """Of 64 nodes with ports split: 32, as in the paper; of a part of the nodes still 32."""
    topology = Topology((Switch("a", tuple(f"a{i}" for i in range(64))), Switch("b", ("b0",))))
    assert topology.uplinks.num_links == 32
    assert topology.of(["a3", "b0"]).uplinks.num_links == 32


def test_from_a_scheduler() -> None:
    found = topology_of({"n10": "s1", "n2": "s1", "n3": "s0", "n4": None})
    assert found.switches == (
        Switch("", ("n4",)),
        Switch("s0", ("n3",)),
        Switch("s1", ("n2", "n10")),
    )


def test_the_part_that_a_job_has() -> None:
    topology = topology_of({"n0": "a", "n1": "a", "n2": "b"})
    assert topology.of(["n2", "n0"]).switches == (Switch("a", ("n0",)), Switch("b", ("n2",)))
    with pytest.raises(ConfigError, match=r"topology: n7, n9 missing; the file has n0, n1, n2"):
        topology.of(["n0", "n7", "n9"])
    with pytest.raises(ConfigError, match="the job has n0 more than once"):
        topology.of(["n0", "n0"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "topology: no node; give [[switch]] tables"),
        ("rails = ", "does not parse"),
        ("rails = 0", "rails: Input should be greater than or equal to 1, got 0"),
        ("rail = 8", "rail is unknown; legal keys"),
        ("nics_per_uplink = inf", "nics_per_uplink: Input should be a finite number"),
        ('[[switch]]\nname = "a"', "switch.0.nodes: Field required"),
        ('[[switch]]\nname = "a"\nnodes = []', "switch.0.nodes: List should have at least 1 item"),
        ('[[switch]]\nname = "a"\nnodes = ["g[2-1]"]', "the range 2-1 runs backwards"),
        (
            '[[switch]]\nname = "a"\nnodes = ["g[1-3]", "g2"]',
            "g2 on more than one switch, or twice on one; legal is each node once",
        ),
        (
            '[[switch]]\nname = "a"\nnodes = ["g1"]\n[[switch]]\nname = "a"\nnodes = ["g2"]',
            "switch 'a' is there twice",
        ),
        (
            '[[switch]]\nname="a"\npod="p"\nnodes=["g"]\n[[node]]\nname="h"\nswitch="a"\npod="q"',
            "puts switch 'a' into pod 'q', which is in 'p'",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        _load(tmp_path, text)
    assert "topology.toml" in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"topology file .* does not exist"):
        load_topology(tmp_path / "none.toml")
