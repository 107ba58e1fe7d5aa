"""Which of two pages is further, and what a stack says of its rank."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.events import group_id
from megascale.telemetry.diagnose.places import (
    AHEAD,
    BEHIND,
    UNKNOWN,
    RankView,
    body_is_over,
    cannot_wait_for_neighbour,
    channels,
    order,
)
from megascale.telemetry.diagnose.stacks import clusters, main_frames, stand

PAYLOAD_OF = {number: what[2] for number, what in channels(4).items()}


def _view(phase: str, m: int | None = None, group: str = "tensor", seq: int = 1) -> RankView:
    chunk = None if m is None else 1
    return RankView(1, 5, phase, m, chunk, group_id(group), seq)


def _send(m: int, payload: str = "activation") -> RankView:
    return _view("send", m, f"1->{2 if payload == 'activation' else 0} {payload}", m)


def _recv(m: int, payload: str = "activation") -> RankView:
    return _view("recv", m, f"{0 if payload == 'activation' else 2}->1 {payload}", 9)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (_view("forward", 2, seq=4), _view("forward", 2, seq=5), BEHIND),
        (_view("forward", 2, "world"), _view("forward", 3), BEHIND),
        (_view("forward", 2, "world"), _send(2), BEHIND),
        (_view("forward", 3, "world"), _send(2), AHEAD),
        (_view("forward", 2, "world"), _view("backward", 2), BEHIND),
        (_view("forward", 2, "world"), _view("backward", 1), UNKNOWN),
        (_send(2), _view("backward", 3), BEHIND),
        (_send(0, "gradient"), _view("backward", 1), BEHIND),
        (_send(1, "gradient"), _send(1), AHEAD),
        (_recv(2), _view("forward", 2), BEHIND),
        (_recv(2), _view("forward", 1), UNKNOWN),  # it is posted ahead
        (_recv(2, "gradient"), _view("backward", 2), BEHIND),
        (_view("data_wait", None, "world"), _view("forward", 0), BEHIND),
        (_view("backward", 3), _view("backward", None, "world"), BEHIND),
        (_view("grad_sync"), _view("backward", 3, "data"), UNKNOWN),
        (_view("grad_sync"), _view("grad_sync", None, "world"), UNKNOWN),  # on either side of it
        (_view("grad_sync", None, "data"), _view("grad_sync", None, "world"), BEHIND),
        (_view("grad_sync"), _view("optimizer", None, "world"), BEHIND),
        (_view("param_gather"), _view("forward", 0, "data"), UNKNOWN),
    ],
)
def test_the_order_of_two_places(one: RankView, other: RankView, expected: int) -> None:
    assert order(one, other, payload_of=PAYLOAD_OF) == expected
    assert order(other, one, payload_of=PAYLOAD_OF) == -expected


def test_a_step_further_is_further() -> None:
    one, other = RankView(1, 6, "data_wait"), RankView(1, 5, "optimizer")
    assert order(one, other, payload_of={}) == AHEAD


def test_channels_have_the_names_of_the_pipeline() -> None:
    found = channels(3)
    assert found[group_id("0->1 activation")] == (0, 1, "activation")
    assert found[group_id("2->0 activation")] == (2, 0, "activation")  # several chunks a stage
    assert len(found) == 12
    assert len(channels(2)) == 4
    assert channels(1) == {}


@pytest.mark.parametrize(
    ("fields", "computes"),
    [
        ({"phase": "forward", "chunk": 1}, True),
        ({"phase": "forward", "chunk": 3}, False),  # the loss: nothing is sent behind it
        ({"phase": "backward", "chunk": 3}, True),
        ({"phase": "backward", "chunk": 0}, False),
        ({"phase": "send", "chunk": 1}, False),
        ({"phase": "data_wait"}, True),
    ],
)
def test_who_cannot_wait_for_a_neighbour(fields: dict[str, Any], computes: bool) -> None:
    assert cannot_wait_for_neighbour(RankView(**fields), last_chunk=3) is computes


def test_behind_the_sums_the_body_is_over() -> None:
    assert body_is_over(_view("backward", 3, "world"))
    assert body_is_over(_view("optimizer"))
    assert not body_is_over(_view("forward", 0, "world"))
    assert not body_is_over(_view("grad_sync"))


CUDA_BACKWARD = """Process 7: python -m megascale train

Thread 7 (idle): "MainThread"
    _engine_run_backward (torch/autograd/graph.py:865)
    backward (torch/autograd/__init__.py:347)
Thread 8 (active)
    synchronize (torch/cuda/streams.py:104)
    backward (megascale/flux/autograd.py:107)
    apply (torch/autograd/function.py:311)
Thread 9 (idle): "lines of rank"
    Condition.wait (threading.py:331)
"""


def test_autograd_runs_backward_in_a_thread_of_its_own() -> None:
    frames = main_frames(CUDA_BACKWARD)
    assert frames[1] == "backward (megascale/flux/autograd.py)"
    assert stand(frames) == "other"
    alone = main_frames(CUDA_BACKWARD.replace("backward (megascale", "hook (megascale"))
    assert stand(alone) is None  # what C++ does there, nobody sees


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (["Pending.wait (megascale/flux/collectives.py)"], "other"),
        (["wait (a.py)", "all_gather_gemm (megascale/flux/all_gather_gemm/nccl.py)"], "tensor"),
        (["wait (a.py)", "finish (megascale/parallel/gradients.py)"], "data"),
        (["_wait (megascale/parallel/transfers.py)"], "transfer"),
        (["isend (torch/distributed/distributed_c10d.py)"], None),
        (["all_reduce (torch/distributed/distributed_c10d.py)"], "other"),
        (["forward (megascale/model/layers.py)"], "busy"),
        (["waiter (megascale/model/layers.py)"], "busy"),
        ([], None),
    ],
)
def test_what_a_stack_says(frames: list[str], expected: str | None) -> None:
    assert stand(frames) == expected


def test_equal_stacks_are_one_cluster_whatever_their_lines() -> None:
    dumps = {rank: f"    f (a.py:{rank})\n    g (b.py:1)" for rank in range(3)}
    dumps[3] = "    h (a.py:1)"
    found = clusters({rank: main_frames(dump) for rank, dump in dumps.items()})
    assert [ranks for _, ranks in found] == [(0, 1, 2), (3,)]
