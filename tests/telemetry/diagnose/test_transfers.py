"""What a transfer achieves counts from the last launch to the first end, whoever waited before."""

from __future__ import annotations

import pytest

from megascale.events import Span
from megascale.telemetry.diagnose.transfers import parts_of, rates
from megascale.topology import Mesh

MS = 1_000_000
GB = 1_000_000_000
MESH = Mesh(1, 4, 2)


def _spans(rank: int, launch_ms: int, done_ms: int, seq: int = 1) -> list[Span]:
    """A reduce-scatter that is posted at `launch_ms` and waited for until `done_ms`."""
    shared = {"rank": rank, "name": "grad_sync", "clock": "device", "step": 1, "bucket": "b"}
    post = Span(
        t0_ns=launch_ms * MS, dur_ns=1000, op="reduce_scatter", group="data", seq=seq,
        num_bytes=GB, stream="data", **shared,  # type: ignore[arg-type]
    )  # fmt: skip
    end = (done_ms - launch_ms) * MS - 5000
    wait = Span(t0_ns=launch_ms * MS + 5000, dur_ns=end, op="finish", **shared)  # type: ignore[arg-type]
    return [post, wait]


def test_waiting_for_the_last_is_not_the_network_s() -> None:
    parts = []
    for rank in range(4):
        launch = 100 if rank == 2 else 10  # rank 2 is late: three wait for it for 90 ms
        parts += parts_of(_spans(rank, launch, 150), MESH)
    (rate,) = rates(parts)
    assert rate.kind == ("grad_sync", "reduce_scatter", "data")
    assert rate.time_s == pytest.approx(0.05)
    assert rate.bytes_per_s == pytest.approx(20 * GB)
    assert rate.slow == ()


def test_a_group_of_which_some_are_not_looked_at_is_left_out() -> None:
    parts = [part for rank in range(3) for part in parts_of(_spans(rank, 10, 50), MESH)]
    assert len(rates(parts)) == 1
    assert rates(parts, {"data": 4}) == []


def test_a_slow_group_among_its_like() -> None:
    mesh = Mesh(4, 2, 1)
    parts = []
    for rank in range(8):
        took = 80 if rank % 4 == 3 else 20
        parts += parts_of(_spans(rank, 10, 10 + took), mesh)
    (rate,) = rates(parts)
    ((instance, times),) = rate.slow
    assert times == pytest.approx(4.0)
    assert rate.ranks[instance] == (3, 7)


def test_what_was_hidden_and_what_one_rank_alone_saw_are_left_out() -> None:
    hidden = [
        part
        for rank in range(4)
        for part in parts_of(
            [_spans(rank, 10, 50)[0], _spans(rank, 10, 50)[1].__class__(
                rank=rank, name="grad_sync", t0_ns=60 * MS, dur_ns=1000, clock="device", step=1,
                op="finish", bucket="b",
            )], MESH,
        )
    ]  # fmt: skip
    assert rates(hidden) == []
    assert rates(parts_of(_spans(0, 10, 50), MESH)) == []


def test_a_send_and_its_receive() -> None:
    send = Span(
        rank=0, name="send", t0_ns=10 * MS, dur_ns=10, clock="device", step=1, chunk=0,
        micro_batch=2, op="activation", group="0->1 activation", seq=7, num_bytes=GB,
    )  # fmt: skip
    receive = Span(
        rank=4, name="recv", t0_ns=2 * MS, dur_ns=10, clock="device", step=1, chunk=1,
        micro_batch=2, op="activation", group="0->1 activation", seq=7, num_bytes=GB,
    )  # fmt: skip
    wait = Span(
        rank=4, name="pp_wait", t0_ns=5 * MS, dur_ns=25 * MS, clock="device", step=1, chunk=1,
        micro_batch=2, op="RA",
    )  # fmt: skip
    (rate,) = rates([*parts_of([send], MESH), *parts_of([receive, wait], MESH)])
    assert rate.kind == ("transfer", "activation", "0->1 activation")
    assert rate.time_s == pytest.approx(0.02)
