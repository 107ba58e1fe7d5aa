"""Ranks that renumber themselves by the network's shape: all agree, and rank 0 stays reachable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megascale.config import RunConfig, parse_config
from megascale.env import NodeEnvironment, RankEnvironment, node_environment
from megascale.errors import ConfigError
from megascale.train.placed import placed, preview

FILE = """
[[switch]]
name = "a"
nodes = ["m0", "m2"]
[[switch]]
name = "b"
nodes = ["m1", "m3"]
"""


def _config(tmp_path: Path, text: str = FILE) -> RunConfig:
    file = tmp_path / "net.toml"
    file.write_text(text)
    return parse_config(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 256},
            "parallelism": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "training": {"global_batch_size": 4, "seq_len": 32},
            "cluster": {"topology": str(file)},
        }
    )


def _rank(global_rank: int, master: str = "m0") -> RankEnvironment:
    return RankEnvironment(global_rank, 8, global_rank % 2, 2, master, 29500, "torchrun")


def _numbers(
    config: RunConfig, master: str, nodes: str | None, free: bool = False
) -> dict[str, list[int]]:
    """New numbers of the ranks of each machine, as each of them finds its own."""
    found: dict[str, list[int]] = {}
    for rank in range(8):
        name = f"m{rank // 2}"
        node = NodeEnvironment(name, nodes, free)
        found.setdefault(name, []).append(
            placed(config, _rank(rank, master), node=node).global_rank
        )
    return found


@pytest.mark.parametrize("nodes", ["m[0-3]", None])
def test_rings_lie_under_switches_and_all_ranks_agree(tmp_path: Path, nodes: str | None) -> None:
    """Data-parallel rings are ranks 0 to 3 and 4 to 7: machines m0 and m2, m1 and m3."""
    found = _numbers(_config(tmp_path), "m0", nodes)
    assert found == {"m0": [0, 1], "m2": [2, 3], "m1": [4, 5], "m3": [6, 7]}


def test_rank_0_stays_where_the_others_look_for_it(tmp_path: Path) -> None:
    found = _numbers(_config(tmp_path), "m3.cluster.local", "m[0-3]")
    assert found["m3"] == [0, 1]
    assert found["m1"] == [2, 3]
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is 10.0.0.1, which is none of the job's"):
        _numbers(_config(tmp_path), "10.0.0.1", "m[0-3]")
    assert _numbers(_config(tmp_path), "10.0.0.1", "m[0-3]", free=True)["m0"] == [0, 1]


def test_nothing_is_renumbered_without_a_file_or_on_one_machine(tmp_path: Path) -> None:
    config = _config(tmp_path)
    bare = config.model_copy(update={"cluster": config.cluster.model_copy(update={"topology": ""})})
    assert placed(bare, _rank(5)) == _rank(5)
    alone = RankEnvironment(3, 8, 3, 8, "m0", 29500, "torchrun")
    assert placed(config, alone) == alone


def test_under_an_agent_the_driver_has_placed_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGASCALE_PROGRESS_PAGE", "/nowhere")
    node = NodeEnvironment("m1", "m[0-3]")
    assert placed(_config(tmp_path), _rank(2), node=node) == _rank(2)


def test_an_open_layout_puts_machines_in_a_ring(tmp_path: Path) -> None:
    node = NodeEnvironment("m2", "m[0-3]")
    found = placed(_config(tmp_path), _rank(4), layout_is_open=True, node=node)
    assert found.global_rank == 2


def test_a_dry_run_tells_what_is_gained(tmp_path: Path) -> None:
    told = preview(_config(tmp_path), 8)
    assert told.startswith("ranks on 4 nodes of 2, by ")
    assert "by topology  data: 0% of the groups and 0% of their edges leave a switch" in told
    with pytest.raises(ConfigError, match="12 ranks are not the same number on each of the 5"):
        preview(_config(tmp_path, '[[switch]]\nname="a"\nnodes=["m[0-4]"]'), 12)
    config = _config(tmp_path)
    bare = config.cluster.model_copy(update={"topology": ""})
    assert preview(config.model_copy(update={"cluster": bare}), 8) == ""


@pytest.mark.parametrize(
    ("name", "nodes", "text", "words"),
    [
        ("m0", None, '[[switch]]\nname="a"\nnodes=["m[0-8]"]', "has 9 nodes and the job 4"),
        ("m0", "m[0-3],m7", FILE, "Slurm's step has 5 machines (m[0-3],m7), the job 4"),
        ("m0", "m[0-2],m7", FILE, "topology: m7 missing; the file has m0, m2, m1, m3"),
        ("x9", "m[0-3]", FILE, "this machine is x9, which is not in"),
        ("m0", "m[0-3]", '[[switch]]\nname="a"\nnodes=["m0"]', "has 1 nodes, the job needs 4"),
    ],
)
def test_bad_input(tmp_path: Path, name: str, nodes: str | None, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        placed(_config(tmp_path, text), _rank(0), node=NodeEnvironment(name, nodes))


def test_machines_of_unequal_ranks(tmp_path: Path) -> None:
    rank = RankEnvironment(0, 8, 0, 3, "m0", 29500, "torchrun")
    with pytest.raises(ConfigError, match="8 ranks with 3 on this machine; legal is the same"):
        placed(_config(tmp_path), rank, node=NodeEnvironment("m0", None))


def test_the_machine_by_the_launchers_variables() -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURMD_NODENAME": "g7", "SLURM_STEP_NODELIST": "g[7-9]"}
    assert node_environment(slurm) == NodeEnvironment("g7", "g[7-9]")
    torchrun = node_environment({"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert torchrun.free_rank_zero
    assert torchrun.job_nodes is None
