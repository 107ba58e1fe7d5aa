"""A file written from samples: what it says, and that it finds the machine that made them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.groups import GroupShape
from megascale.plan.machine.load import load_cluster
from megascale.plan.machine.minimise import minimise
from megascale.plan.machine.sampled import attention_of
from megascale.plan.machine.samples import (
    AttentionSample,
    CollectiveSample,
    GemmSample,
    MemorySample,
    OverlapSample,
    Samples,
)
from megascale.plan.machine.toml import toml_text
from megascale.plan.machine.write import write_cluster
from megascale.plan.work.operations import Direction, Gemm, MemoryPass, Transfer

TRUE = {
    "device.gemm.share": 0.7,
    "device.gemm.wgrad": 0.9,
    "device.gemm.half_depth": 120.0,
    "device.gemm.storing": 0.9,
    "device.gemm.rounding": 0.5,
    "device.attention.forward": 0.5,
    "device.attention.backward": 0.35,
    "device.memory.share": 0.8,
    "nvlink.all_gather": 0.6,
    "nvlink.base_s": 30e-6,
    "nvlink.step_s": 4e-6,
}


@pytest.fixture(scope="module")
def machine() -> Cluster:
    """A made-up device, which measures itself by its own curves."""
    return load_cluster("a100").changed(TRUE)


def measured_by(machine: Cluster) -> Samples:
    def gemm(rows: int, columns: int, depth: int, kind: Direction) -> GemmSample:
        seconds = machine.seconds(Gemm("g", rows, columns, depth, kind))
        sizes = {"rows": rows, "columns": columns, "depth": depth}
        return GemmSample(**sizes, direction=kind, seconds=seconds)

    def core(seq_len: int, heads: int, backward: bool) -> AttentionSample:
        sizes = {"sequences": 1, "seq_len": seq_len, "heads": heads, "kv_heads": heads}
        shape = AttentionSample(**sizes, head_dim=128, backward=backward, seconds=1.0)
        seconds = machine.seconds(attention_of(shape))
        return shape.model_copy(update={"seconds": seconds})

    def ring(ranks: int, num_bytes: float) -> CollectiveSample:
        kind = Transfer.ALL_GATHER
        seconds = machine.transfer_s(kind, num_bytes, GroupShape(ranks, ranks))
        shape = {"ranks": ranks, "num_bytes": num_bytes, "link": "nvlink", "seconds": seconds}
        return CollectiveSample(transfer=kind, **shape)

    shapes = [(m, n, k) for m in (1024, 4096) for n in (1536, 4096, 12_288) for k in (512, 8192)]
    return Samples(
        device="NVIDIA A100-SXM4-80GB",
        versions={"torch": "2"},
        gemm=tuple(gemm(*shape, kind) for shape in shapes for kind in Direction),
        attention=tuple(
            core(s, h, back) for s in (1024, 8192) for h in (4, 32) for back in (False, True)
        ),
        memory=(
            MemorySample(name="copy", num_bytes=1e9, seconds=1e9 / (0.8 * 2039e9)),
            MemorySample(name="norm", num_bytes=1e8, seconds=1e-4),
        ),
        collective=tuple(ring(n, b) for n in (2, 4, 8) for b in (1e5, 1e7, 1e9)),
        overlap=(
            OverlapSample(
                compute="gemm",
                transfer="all_gather",
                compute_slow_down=1.25,
                transfer_slow_down=1.5,
            ),
            OverlapSample(
                compute="gemm", transfer="host", compute_slow_down=3.0, transfer_slow_down=3.0
            ),
        ),
        launch_s=4e-6,
        sustained=0.93,
    )


def test_what_was_measured_is_found_again(machine: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    write_cluster(path, measured_by(machine), 8, 8, num_sms=108, memory_gb=79.1)
    found = load_cluster(str(path))
    assert found.name == "mine"
    assert found.device.launch_s == 4e-6
    assert found.device.memory_gb == 79.1
    assert found.device.gemm.sustained == 0.93
    assert found.overlap.compute_nvlink == 1.25
    assert found.overlap.transfer_nvlink == 1.5
    assert found.device.memory.share == pytest.approx(0.8, rel=1e-3)
    assert found.nvlink.all_gather == pytest.approx(0.6, rel=0.05)
    assert found.nvlink.step_s == pytest.approx(4e-6, rel=0.3)
    assert found.device.gemm.share == pytest.approx(0.7, rel=0.05)
    assert found.device.attention.backward == pytest.approx(0.35, rel=0.05)
    # sizes that were not measured, at a burst's rate
    cool = found.changed({"device.gemm.sustained": 1.0})
    for kind in Direction:
        gemm = Gemm("g", 2048, 6144, 3000, kind)
        assert cool.seconds(gemm) == pytest.approx(machine.seconds(gemm), rel=0.05)
    group = GroupShape(8, 8)
    assert found.transfer_s(Transfer.ALL_GATHER, 1e7, group) == pytest.approx(
        machine.transfer_s(Transfer.ALL_GATHER, 1e7, group)
    )
    assert found.seconds(MemoryPass("norm", 1e8)) == pytest.approx(1e-4)


def test_a_file_says_what_was_fitted_and_what_was_not_asked(
    machine: Cluster, tmp_path: Path
) -> None:
    one_node, more = tmp_path / "one.toml", tmp_path / "more.toml"
    samples = measured_by(machine)
    write_cluster(one_node, samples, 8, 8)
    write_cluster(more, samples, 64, 8)
    assert load_cluster(str(one_node)).network is None
    several = load_cluster(str(more))
    assert several.network is not None
    assert several.network.source_of("nic_gb_s").startswith("data sheet")
    assert several.device.gemm.source_of("share").startswith("fitted: on the samples")
    assert several.device.source_of("launch_s") == "measured"
    assert several.device.source_of("peak_tflops") == "data sheet"


def test_a_device_that_nobody_knows_gets_peaks_above_its_samples(tmp_path: Path) -> None:
    samples = Samples(
        device="Something 9000",
        gemm=(
            GemmSample(
                rows=8192, columns=8192, depth=8192, direction=Direction.FORWARD, seconds=0.01
            ),
        ),
        memory=(MemorySample(name="copy", num_bytes=1e9, seconds=1e-3),),
    )
    path = tmp_path / "new.toml"
    write_cluster(path, samples, 4, 4, num_sms=64, memory_gb=40.0)
    device = load_cluster(str(path)).device
    assert device.peak_tflops == pytest.approx(2e-12 * 8192**3 / 0.01 / 0.9, rel=1e-3)
    assert device.source_of("peak_tflops").startswith("assumed")
    assert load_cluster(str(path)).seconds(
        Gemm("g", 8192, 8192, 8192, Direction.FORWARD)
    ) == pytest.approx(0.01, rel=0.02)


def test_what_was_not_measured_now_stays_as_it_was(tmp_path: Path) -> None:
    before = load_cluster("h200").samples
    assert before is not None
    row = CollectiveSample(
        transfer=Transfer.ALL_GATHER, ranks=2, num_bytes=1e6, link="nvlink", seconds=1e-3
    )
    path = tmp_path / "cluster.toml"
    write_cluster(path, Samples(device="NVIDIA H200", collective=(row,)), 2, 2)
    after = load_cluster(str(path)).samples
    assert after is not None
    assert after.gemm == before.gemm
    assert [s for s in after.collective if (s.transfer, s.ranks) == (row.transfer, 2)] == [row]
    assert {s.ranks for s in after.collective} == {s.ranks for s in before.collective}
    assert "some of gemm, attention, memory, collective before" in after.source
    slow = load_cluster(str(path)).transfer_s(Transfer.ALL_GATHER, 1e6, GroupShape(2, 2))
    assert slow == pytest.approx(1e-3)


def test_toml_comes_back_as_it_was() -> None:
    tables = {
        "name": 'a "quoted" \\ name\n',
        "number": 1e-06,
        "whole": 3,
        "yes": True,
        "section": {"*": "x", "empty": {}, "rows": [{"a": 1, "b": "two"}, {"a": 2, "b": "é"}]},
    }
    assert tomllib.loads(toml_text({**tables, "absent": None})) == tables


def test_the_least_of_a_bowl_and_of_a_slope() -> None:
    found = minimise(
        lambda x: (x["a"] - 0.3) ** 2 + abs(x["b"] - x["a"] - 2.0) + x["c"],
        {"a": 0.9, "b": 9.0, "c": 0.5},
        {"a": (0.0, 1.0), "b": (0.0, 10.0), "c": (0.1, 1.0)},
        rounds=400,
    )
    assert found["c"] == pytest.approx(0.1)
    assert found["b"] - found["a"] == pytest.approx(2.0, abs=0.02)
