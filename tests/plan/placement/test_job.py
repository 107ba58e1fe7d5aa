"""What a launcher keeps of a job to place it, and orders made from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megascale.config import RunConfig, parse_config
from megascale.errors import ConfigError
from megascale.plan.placement.job import JobPlacement, placement_of
from megascale.plan.placement.topology import Switch, Topology
from megascale.topology import Mesh

TWO = Topology((Switch("a", ("n0", "n2")), Switch("b", ("n1", "n3"))))


def _config(topology: Path | str = "", **model: Any) -> RunConfig:
    return parse_config(
        {
            "model": {"num_layers": 4, "hidden_size": 64, "num_heads": 4, **model},
            "parallelism": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "training": {"global_batch_size": 8, "seq_len": 32},
            "cluster": {"topology": str(topology)},
        }
    )


def test_of_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text('[[switch]]\nname = "a"\nnodes = ["n[0-3]"]\n')
    found = placement_of(_config(file, vocab_size=256), 4, 2)
    assert (found.tensor, found.pipeline, found.procs_per_node) == (2, 2, 2)
    assert found.mesh(4) == Mesh(2, 2, 2)
    assert found.topology is not None
    assert found.topology.nodes == ["n0", "n1", "n2", "n3"]
    assert found.num_bytes["data"] > 0.0


def test_a_vocabulary_that_is_not_known_yet_leaves_the_head_out() -> None:
    unknown, known = placement_of(_config(), 4, 2), placement_of(_config(vocab_size=256), 4, 2)
    head = 256 * 64 / 4 * (4 + 4) / 2  # of a device, gradients and fp32 parameters, a ring of two
    assert known.num_bytes["data"] - unknown.num_bytes["data"] == pytest.approx(head)


def test_too_few_nodes_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text('[[switch]]\nname = "a"\nnodes = ["n[0-2]"]\n')
    words = "has 3 nodes, the job needs 4: 1 missing; add them to the file"
    with pytest.raises(ConfigError, match=re.escape(words)):
        placement_of(_config(file), 4, 2)


def test_an_order_by_the_file() -> None:
    placement = JobPlacement(2, tensor=2, pipeline=2, topology=TWO)
    found = placement.order(4, dict.fromkeys(["n0", "n1", "n2", "n3"]))
    assert found is not None
    assert found.order == ("n0", "n2", "n1", "n3")
    assert found.gain >= 1.0


def test_an_order_by_what_the_scheduler_says() -> None:
    placement = JobPlacement(2, tensor=2, pipeline=2)
    found = placement.order(4, {"n0": "s", "n1": "t", "n2": "s", "n3": "t"})
    assert found is not None
    assert found.order == ("n0", "n2", "n1", "n3")
    assert placement.order(4, dict.fromkeys(["n0", "n1", "n2", "n3"], "s")) is None
    assert placement.order(4, dict.fromkeys(["n0", "n1", "n2", "n3"])) is None


def test_degrees_that_do_not_fill_the_nodes_have_no_order() -> None:
    placement = JobPlacement(2, tensor=4, pipeline=2, topology=TWO)
    assert placement.mesh(3) is None
    assert placement.order(3, dict.fromkeys(["n0", "n1", "n2"])) is None


def test_hosts_that_the_file_does_not_have() -> None:
    placement = JobPlacement(2, tensor=2, topology=TWO)
    hosts = ["n0", "n1", "n2", "n9"]
    assert placement.unknown(hosts) == ["n9"]
    assert placement.switches(dict.fromkeys(hosts, "z")) == {
        "n0": "a",
        "n1": "b",
        "n2": "a",
        "n9": "z",
    }
    found = placement.order(4, dict.fromkeys(hosts))
    assert found is not None
    assert sorted(found.order) == hosts
    assert JobPlacement(2, tensor=2).unknown(hosts) == []
