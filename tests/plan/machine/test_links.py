"""Rings and trees by hand."""

from __future__ import annotations

import pytest

from megascale.plan.machine.groups import GroupShape
from megascale.plan.machine.links import Network, NodeLink, across_s, inside_s, moved_bytes
from megascale.plan.machine.samples import CollectiveSample
from megascale.plan.machine.transfers import SampledLinks
from megascale.plan.work.operations import Transfer

SHARES = {"all_gather": 0.5, "reduce_scatter": 0.25, "all_reduce": 0.8, "send": 1.0}
NODE = NodeLink(gb_s=100.0, **SHARES, base_s=1e-5, step_s=1e-6, source="assumed: test")
NETWORK = Network(
    nic_gb_s=10.0, nics_per_node=8, **SHARES, base_s=2e-5, step_s=5e-6, source="assumed: test"
)
S = 8e8


def test_a_ring_in_a_node() -> None:
    # seven steps; each member sends 7/8 of 800 MB at 50 GB/s
    assert inside_s(NODE, Transfer.ALL_GATHER, S, 8) == pytest.approx(1e-5 + 7e-6 + 7e8 / 50e9)
    assert inside_s(NODE, Transfer.REDUCE_SCATTER, S, 8) == pytest.approx(1.7e-5 + 7e8 / 25e9)
    assert inside_s(NODE, Transfer.ALL_REDUCE, S, 8) == pytest.approx(2.4e-5 + 14e8 / 80e9)
    assert inside_s(NODE, Transfer.SEND, S, 2) == pytest.approx(1e-5 + S / 100e9)
    assert moved_bytes(Transfer.ALL_REDUCE, S, 2) == S


def test_a_ring_over_nodes_with_a_member_on_each() -> None:
    shape = GroupShape(64, 1)
    seconds = across_s(NETWORK, NODE, Transfer.ALL_GATHER, S, shape, 10e9)
    assert seconds == pytest.approx(2e-5 + 63 * 5e-6 + S * 63 / 64 / 5e9)


def test_members_of_a_node_bring_a_nic_each_until_nvlink_tells() -> None:
    shape = GroupShape(16, 8)
    latency_s = 2e-5 + 15 / 8 * 5e-6 + (15 - 15 / 8) * 1e-6
    seconds = across_s(NETWORK, NODE, Transfer.ALL_GATHER, S, shape, 80e9)
    assert seconds == pytest.approx(latency_s + S * 15 / 16 / 40e9)
    fast = NETWORK.model_copy(update={"nic_gb_s": 100.0})
    seconds = across_s(fast, NODE, Transfer.ALL_GATHER, S, shape, 800e9)
    assert seconds == pytest.approx(latency_s + S * 15 / 16 / 50e9)


def test_a_small_all_reduce_takes_the_tree_and_a_large_one_the_ring() -> None:
    shape = GroupShape(64, 1)
    small = across_s(NETWORK, NODE, Transfer.ALL_REDUCE, 1e3, shape, 10e9)
    assert small == pytest.approx(2e-5 + 2 * 6 * 5e-6 + 2e3 / 8e9)
    large = across_s(NETWORK, NODE, Transfer.ALL_REDUCE, 1e12, shape, 10e9)
    assert large == pytest.approx(2e-5 + 126 * 5e-6 + 2e12 * 63 / 64 / 8e9)
    ring_only = NETWORK.model_copy(update={"tree": False})
    assert across_s(ring_only, NODE, Transfer.ALL_REDUCE, 1e3, shape, 10e9) > 126 * 5e-6


def sample(transfer: Transfer, ranks: int, num_bytes: float, seconds: float) -> CollectiveSample:
    return CollectiveSample(
        transfer=transfer, ranks=ranks, num_bytes=num_bytes, link="nvlink", seconds=seconds
    )


def test_measured_lines_replace_formulas_and_serve_other_numbers_of_ranks() -> None:
    rows = (
        sample(Transfer.ALL_GATHER, 4, 4e8, 9e-3),
        sample(Transfer.ALL_GATHER, 4, 4e6, 2e-4),
    )
    links = SampledLinks(NODE, NETWORK, 8, rows)
    assert links.inside_s(Transfer.ALL_GATHER, 4e8, 4) == pytest.approx(9e-3)
    # among eight, 7/8 S pass a link as 3/4 of S * 7/6 do among four, and four steps are added
    eight = links.inside_s(Transfer.ALL_GATHER, 4e8 * 6 / 7, 8)
    assert eight == pytest.approx(9e-3 + 4e-6)
    unmeasured = links.inside_s(Transfer.REDUCE_SCATTER, S, 8)
    assert unmeasured == inside_s(NODE, Transfer.REDUCE_SCATTER, S, 8)


def test_no_measured_line_beats_the_link_or_a_transfer_s_base() -> None:
    links = SampledLinks(NODE, None, 8, (sample(Transfer.ALL_GATHER, 2, 1e9, 1e-6),))
    assert links.inside_s(Transfer.ALL_GATHER, 1e9, 2) == pytest.approx(0.5e9 / 100e9)
    assert links.inside_s(Transfer.ALL_GATHER, 1.0, 2) == pytest.approx(1e-5)


def test_copy_engines() -> None:
    plain = SampledLinks(NODE, None, 8, ())
    assert plain.copied_s(Transfer.ALL_GATHER, S, 8) == pytest.approx(1e-6 + 7e8 / 80e9)
    row = CollectiveSample(
        transfer=Transfer.SEND, ranks=4, num_bytes=7e8, link="copy_engine", seconds=0.1
    )
    measured = SampledLinks(NODE, None, 8, (row,))
    assert measured.copied_s(Transfer.ALL_GATHER, S, 8) == pytest.approx(0.1)
