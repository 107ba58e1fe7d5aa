"""Cluster files: the catalogue, references, and every kind of bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import ConfigError
from megascale.plan.machine.load import CATALOGUE, cluster_tables_of, load_cluster
from megascale.plan.machine.sourced import KINDS, Sourced
from megascale.plan.machine.toml import toml_text
from megascale.units import peak_tflops

Change = Callable[[dict[str, Any]], object]


def written(tmp_path: Path, change: Change, name: str = "a100") -> str:
    """A copy of a catalogue's file with something changed."""
    tables = cluster_tables_of(name)
    change(tables)
    path = tmp_path / "cluster.toml"
    path.write_text(toml_text(tables))
    return str(path)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_number_of_the_catalogue_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    sections: list[Sourced] = [cluster, cluster.device, cluster.nvlink, cluster.overlap]
    sections += [cluster.device.gemm, cluster.device.attention, cluster.device.memory]
    sections += [part for part in (cluster.network, cluster.fabric) if part is not None]
    for section in sections:
        for key in section.model_fields_set - {"source"}:
            if isinstance(getattr(section, key), int | float):
                assert section.source_of(key).startswith(KINDS), (name, key)


@pytest.mark.parametrize("name", CATALOGUE)
def test_peaks_are_those_that_mfu_is_printed_with(name: str) -> None:
    device = load_cluster(name).device
    known = peak_tflops(device.name)
    assert known is not None
    assert device.peak_tflops == known[0]


def test_the_paper_s_cluster_is_an_a100_on_the_paper_s_fabric() -> None:
    paper, a100 = load_cluster("paper"), load_cluster("a100")
    assert paper.device == a100.device
    assert paper.num_devices == 12_288
    assert paper.num_nodes == 1536
    fabric = paper.fabric
    assert fabric is not None
    assert (fabric.servers_per_tor_set, fabric.rails, fabric.switch_ports) == (64, 8, 64)
    assert fabric.down_port_split == 2


def test_fewer_devices_than_a_node_are_a_smaller_node() -> None:
    cluster = load_cluster("h200", 2)
    assert (cluster.num_devices, cluster.devices_per_node, cluster.num_nodes) == (2, 2, 1)


def test_a_file_may_name_another_beside_it(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(toml_text(cluster_tables_of("h100")))
    path = written(tmp_path, lambda tables: tables.update(device="other.toml", nvlink="h200"))
    cluster = load_cluster(path)
    assert cluster.device == load_cluster("h100").device
    assert cluster.nvlink == load_cluster("h200").nvlink


def drop(section: str) -> Change:
    return lambda tables: tables.pop(section)


def put(path: str, value: Any) -> Change:
    def change(tables: dict[str, Any]) -> None:
        *sections, key = path.split(".")
        for section in sections:
            tables = tables[section]
        tables[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("num_devices", 20), r"leaves a node uneven.*nearest legal: 16 or 24"),
        (put("num_devices", 32_768), "above most_devices 16384"),
        (put("network.nic_gb_s", 0.0), r"network.nic_gb_s: .*got 0.0; nearest legal: 0.05"),
        (put("network.nic_gb_s", -25.0), "network.nic_gb_s: .*nearest legal: 0.05"),
        (put("network.nic_gb_s", 1e6), "network.nic_gb_s: .*nearest legal: 1000"),
        (put("network.nic_gb_s", 400.0), "faster than nvlink.gb_s 300.*at most 300"),
        (put("nvlink.gb_s", 0), "nvlink.gb_s: .*nearest legal: 0.1"),
        (put("device.memory_gb_s", 2e6), "device.memory_gb_s: .*nearest legal: 100000"),
        (put("device.gemm.share", 0.0), "device.gemm.share: .*nearest legal: a number above 0"),
        (put("nvlink", 3), "nvlink: got 3, legal: a table, or the name of a cluster file"),
        (put("device.gemm.share", 1.2), "device.gemm.share: .*nearest legal: 1"),
        (put("device.memory.shares", {"norm": 3.0}), "memory.shares.norm is 3.0"),
        (put("overlap.compute_nvlink", 0.5), "overlap.compute_nvlink: .*nearest legal: 1"),
        (drop("network"), r"16384 devices are 2048 nodes, but there is no \[network\]"),
        (drop("device"), "device: missing"),
        (drop("nvlink"), "nvlink: missing"),
        (put("device.peak_tflop", 312), "unknown key 'peak_tflop'; did you mean 'peak_tflops'"),
        (put("netwrok", {}), "unknown key 'netwrok'; did you mean 'network'"),
        (put("device.num_sms", "108"), "device.num_sms: got '108', legal: a whole number"),
        (put("device.gemm.source", "because"), "begin with one of: measured, fitted"),
        (put("device.gemm.source", {"share": "measured"}), "no source; say in `source`"),
        (put("device.gemm.source", {"*": "assumed", "shar": "measured"}), "source for 'shar'"),
        (put("device", "nowhere"), "'nowhere' is neither a file nor a known name"),
    ],
)
def test_bad_files_are_refused_with_what_is_legal(
    tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_cluster(written(tmp_path, change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("fabric.servers_per_tor_set", 128), "needs 64 ports.*nearest legal: 64 servers"),
        (put("fabric.uplinks_per_tor", 16), "contradicts its ports.*nearest legal: 2"),
        (put("fabric.rails", 3), "does not divide network.nics_per_node 8"),
    ],
)
def test_a_fabric_that_cannot_be_wired_is_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_cluster(written(tmp_path, change, "paper"))


def test_every_problem_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    def change(tables: dict[str, Any]) -> None:
        put("device.num_sms", 0)(tables)
        put("nvlink.gb_s", -1.0)(tables)

    with pytest.raises(ConfigError, match=r"(?s)device\.num_sms.*nvlink\.gb_s"):
        load_cluster(written(tmp_path, change))


def test_names_sizes_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nearest: 'h200'"):
        load_cluster("h20")
    with pytest.raises(ConfigError, match="ask for 1 to 16384"):
        load_cluster("a100", 100_000)
    with pytest.raises(ConfigError, match="nearest legal: 96 or 104"):
        load_cluster("a100", 100)
    broken = tmp_path / "broken.toml"
    broken.write_text("name = [")
    with pytest.raises(ConfigError, match="does not parse"):
        load_cluster(str(broken))


def test_files_that_name_each_other_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text('device = "two.toml"')
    two.write_text('device = "one.toml"')
    with pytest.raises(ConfigError, match="leads back to itself"):
        load_cluster(str(one))
