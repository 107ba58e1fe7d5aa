"""Prices of a cluster: through its samples, growing, above the roofline, fast."""

from __future__ import annotations

import time
from itertools import product
from math import isfinite
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.groups import GroupShape
from megascale.plan.machine.load import CATALOGUE, load_cluster
from megascale.plan.machine.sampled import attention_of
from megascale.plan.work.operations import Attention, Direction, Gemm, MemoryPass, Transfer

CLUSTERS = {name: load_cluster(name) for name in CATALOGUE}
NAMES = st.sampled_from(CATALOGUE)
H200 = CLUSTERS["h200"]
GROUPS = st.sampled_from(
    [GroupShape(2, 2), GroupShape(8, 8), GroupShape(2, 1), GroupShape(192, 1), GroupShape(64, 4)]
)
# powers and what lies between: samples are at powers
SIZES = st.integers(1, 60_000) | st.sampled_from([512, 1024, 2048, 4096, 8192, 12_288, 24_576])


@settings(max_examples=300)
@given(
    NAMES,
    SIZES,
    SIZES,
    SIZES,
    st.sampled_from(["rows", "columns", "depth"]),
    st.integers(1, 3000),
    st.sampled_from(list(Direction)),
)
def test_products_grow_and_stay_above_the_roofline(
    name: str, rows: int, columns: int, depth: int, which: str, more: int, kind: Direction
) -> None:
    cluster = CLUSTERS[name]
    sizes = {"rows": rows, "columns": columns, "depth": depth}
    small = Gemm("g", **sizes, direction=kind)
    large = Gemm("g", **{**sizes, which: sizes[which] + more}, direction=kind)
    price_s = cluster.seconds(small)
    assert isfinite(price_s)
    assert price_s <= cluster.seconds(large) * (1 + 1e-9)
    assert price_s >= small.flops / (cluster.device.peak_tflops * 1e12)
    assert price_s >= 2 * (rows + columns) * depth / cluster.device.bytes_per_s


@settings(max_examples=200)
@given(
    NAMES,
    st.integers(1, 8),
    st.integers(16, 20_000),
    st.integers(1, 96),
    st.sampled_from([64, 96, 128]),
    st.integers(16, 4000) | st.none(),
    st.booleans(),
    st.sampled_from(["sequences", "seq_len", "heads", "head_dim", "window"]),
    st.integers(1, 2000),
)
def test_attention_grows(
    name: str,
    sequences: int,
    seq_len: int,
    heads: int,
    head_dim: int,
    window: int | None,
    backward: bool,
    which: str,
    more: int,
) -> None:
    sizes = {"sequences": sequences, "seq_len": seq_len, "heads": heads, "head_dim": head_dim}
    limits = {**sizes, "window": window}
    grown = limits[which]
    larger = {**limits, which: None if grown is None else grown + more}
    small, large = (
        Attention("a", kv_heads=1, backward=backward, **values)  # type: ignore[arg-type]
        for values in (limits, larger)
    )
    windowed = [a.window is not None and a.window < a.seq_len for a in (small, large)]
    assume(windowed[0] == windowed[1])  # a window has a kernel of its own, which can be slower
    cluster = CLUSTERS[name]
    assert 0 < cluster.seconds(small) <= cluster.seconds(large) * (1 + 1e-9)


@given(
    NAMES,
    st.sampled_from(["norm", "adamw", "cross_entropy_backward", "of no sample"]),
    st.floats(0, 1e11),
    st.floats(0, 1e11),
    st.integers(1, 9),
)
def test_passes_grow(name: str, what: str, one: float, two: float, kernels: int) -> None:
    cluster = CLUSTERS[name]
    low, high = sorted((one, two))
    price_s = cluster.seconds(MemoryPass(what, low, kernels))
    assert price_s <= cluster.seconds(MemoryPass(what, high, kernels)) * (1 + 1e-9)
    assert price_s >= low / cluster.device.bytes_per_s


@settings(max_examples=200)
@given(
    NAMES,
    st.sampled_from(list(Transfer)),
    st.floats(1, 1e11),
    st.floats(1, 1e11),
    GROUPS,
    st.floats(0.05, 1.0),
)
def test_transfers_grow(
    name: str, kind: Transfer, one: float, two: float, group: GroupShape, share: float
) -> None:
    cluster = CLUSTERS[name]
    low, high = sorted((one, two))
    price_s = cluster.transfer_s(kind, low, group, share)
    assert 0 < price_s <= cluster.transfer_s(kind, high, group, share) * (1 + 1e-9)
    assert cluster.transfer_s(kind, low, group) <= price_s * (1 + 1e-9)


def test_prices_pass_through_the_samples() -> None:
    assert H200.samples is not None
    off = [
        abs(H200.device.gemm.sustained * H200.seconds(gemm) / s.seconds - 1)
        for s in H200.samples.gemm
        if (gemm := Gemm("g", s.rows, s.columns, s.depth, s.direction)).flops > 1e12
    ]
    # `sustained` slows all but the stores; samples nearer than noise are halved between
    assert sum(off) / len(off) < 0.02
    cores = [abs(H200.seconds(attention_of(a)) / a.seconds - 1) for a in H200.samples.attention]
    assert sum(cores) / len(cores) < 0.03  # key-value heads are no coordinate
    passes = [
        abs(H200.seconds(MemoryPass(m.name, m.num_bytes)) / m.seconds - 1)
        for m in H200.samples.memory
    ]
    assert sum(passes) / len(passes) < 0.02


def test_half_the_network_takes_twice_as_long_but_for_latency() -> None:
    cluster, group = CLUSTERS["paper"], GroupShape(192, 1)
    whole, half = (
        cluster.transfer_s(Transfer.ALL_GATHER, 1e10, group, share) for share in (1.0, 0.5)
    )
    assert cluster.network is not None
    latency_s = cluster.network.base_s + 191 * cluster.network.step_s
    assert half - latency_s == pytest.approx(2 * (whole - latency_s))
    inside = GroupShape(8, 8)
    assert cluster.transfer_s(Transfer.ALL_GATHER, 1e9, inside, 0.5) == cluster.transfer_s(
        Transfer.ALL_GATHER, 1e9, inside
    )


def test_nothing_to_move_costs_nothing() -> None:
    assert H200.transfer_s(Transfer.ALL_REDUCE, 1e9, GroupShape(1, 1)) == 0.0
    assert H200.transfer_s(Transfer.ALL_REDUCE, 0.0, GroupShape(8, 8)) == 0.0


def test_slow_downs_are_by_link() -> None:
    assert H200.link_of(GroupShape(8, 8)) == "nvlink"
    assert H200.link_of(GroupShape(16, 8)) == "network"
    assert H200.slow_down("nvlink") == H200.overlap.compute_nvlink
    assert H200.transfer_slow_down("network") == H200.overlap.transfer_network


def test_a_changed_cluster_has_new_prices_and_leaves_the_old() -> None:
    gemm = Gemm("g", 4096, 4096, 4096, Direction.FORWARD)
    before_s = CLUSTERS["a100"].seconds(gemm)
    slower = CLUSTERS["a100"].changed({"device.gemm.share": 0.435})
    assert slower.seconds(gemm) > 1.5 * before_s
    assert CLUSTERS["a100"].seconds(gemm) == before_s
    assert CLUSTERS["a100"].changed({}) == CLUSTERS["a100"]


def test_clusters_are_keys() -> None:
    assert len({load_cluster("a100"), load_cluster("a100"), load_cluster("a100", 64)}) == 2


def test_a_price_takes_microseconds() -> None:
    cluster = Cluster.model_validate(H200.model_dump(exclude_unset=True))
    gemms = [Gemm("g", 2048 + i, 12_288, 12_288, Direction.FORWARD) for i in range(500)]
    took_s = []
    for _ in range(3):  # the first pass prices, the others remember
        start = time.perf_counter()
        for gemm in gemms:
            cluster.seconds(gemm)
        took_s.append((time.perf_counter() - start) / len(gemms))
    assert took_s[0] < 1e-3
    assert min(took_s) < 2e-5


def noisy() -> Cluster:
    """An A100 whose samples are off by anything between a half and twice."""
    cluster, random = CLUSTERS["a100"], Random(1)
    rows = []
    for size in product((512, 2048, 8192), (1024, 4096, 12_288), (1024, 12_288)):
        gemm = Gemm("g", *size, direction=Direction.FORWARD)
        row = dict(zip(("rows", "columns", "depth"), size, strict=True))
        seconds = cluster.seconds(gemm) * 2.0 ** random.uniform(-1, 1)
        rows.append({**row, "direction": "forward", "seconds": seconds})
    return cluster.changed({"samples": {"device": "x", "gemm": rows}})


NOISY = noisy()


@settings(max_examples=300)
@given(
    st.tuples(SIZES, SIZES, SIZES), st.integers(0, 2), st.integers(1, 3000) | st.sampled_from([1])
)
def test_noise_in_samples_does_not_make_a_larger_product_cheaper(
    size: tuple[int, int, int], which: int, more: int
) -> None:
    larger = tuple(value + (more if i == which else 0) for i, value in enumerate(size))
    small, large = (
        NOISY.seconds(Gemm("g", a, b, c, Direction.FORWARD)) for a, b, c in (size, larger)
    )
    assert small <= large * (1 + 1e-9)
