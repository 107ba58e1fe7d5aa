"""What a rank records at the deadline of a collective: on the host, on a device, with an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale.events import Event, Ongoing, read_events
from megascale.telemetry import deadline
from megascale.telemetry.clock import MonotonicClock
from megascale.telemetry.deadline import Deadline, peers
from megascale.telemetry.recorder import Recorder
from megascale.telemetry.spans import OpenSpan
from megascale.telemetry.standing import WAITS, Standing, standing
from megascale.telemetry.writer import LineWriter
from megascale.topology import Mesh
from tests.telemetry.test_recorder import FakeClock

AFTER_S = 0.05
MESH = Mesh(2, 2, 2)


class Watched:
    """A recorder of rank 3 whose line file is read while it is open."""

    def __init__(self, path: Path) -> None:
        self.writer = LineWriter(path, rank=3, flush_interval_s=60.0)
        self.recorder = Recorder(MonotonicClock(), self.writer, rank=3)
        self.deadline = Deadline(self.recorder, self.writer, MESH, after_s=AFTER_S)

    def told(self) -> list[Ongoing]:
        return [event for event in read_events(self.writer.path) if isinstance(event, Ongoing)]

    def wait_for(self, number: int) -> list[Ongoing]:
        give_up_s = time.monotonic() + 10
        while len(found := self.told()) < number:
            assert time.monotonic() < give_up_s, f"{len(found)} of {number} records"
            time.sleep(0.005)
        return found


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    one = Watched(tmp_path / "rank.jsonl")
    with one.writer, one.deadline:
        yield one


def test_a_collective_is_recorded_once_and_at_once(watched: Watched) -> None:
    recorder = watched.recorder
    with recorder.step(7), recorder.span("forward", chunk=1, micro_batch=2):
        for _ in range(2):
            with recorder.span("tp_all_gather_gemm", group="tensor"):
                pass
        with recorder.span("tp_all_gather_gemm", group="tensor"), recorder.span("tp_transfer"):
            (told,) = watched.wait_for(1)
            time.sleep(4 * AFTER_S)
            assert watched.told() == [told], "not every second"
    assert (told.rank, told.name, told.step, told.phase) == (3, "tp_all_gather_gemm", 7, "forward")
    assert (told.chunk, told.micro_batch, told.group, told.seq) == (1, 2, "tensor", 3)
    assert (told.peers, told.posted, told.error) == ([2], {"tensor": 3}, None)
    assert told.waited_ns >= AFTER_S * 1e9


def test_the_next_wait_has_its_own(watched: Watched) -> None:
    recorder = watched.recorder
    for number in (1, 2):
        with recorder.span("world_sums", op="all_reduce", group="world"):
            assert watched.wait_for(number)[-1].seq == number


def test_who_waits_in_a_save_for_who_still_writes_has_more_patience(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "_PATIENCE_IN_SAVES", 8)
    recorder = watched.recorder
    agreement: dict[str, Any] = {"op": "all_gather", "group": "world", "host": True}
    with recorder.span("checkpoint", op="save", host=True):
        time.sleep(2 * AFTER_S)  # it writes its own
        began_s = time.monotonic()
        with recorder.span("agreement", **agreement):
            (told,) = watched.wait_for(1)
            assert time.monotonic() - began_s >= 8 * AFTER_S
    assert (told.name, told.group, told.seq, told.phase) == ("agreement", "world", 1, "checkpoint")
    with recorder.span("agreement", **agreement):
        assert watched.wait_for(2)[1].phase is None
        assert watched.told()[1].waited_ns < 8 * AFTER_S * 1e9


def test_an_error_is_recorded_before_the_deadline_and_after_it(watched: Watched) -> None:
    with pytest.raises(RuntimeError):
        _lose_a_peer(watched)
    first, second = watched.told()
    assert (first.error, second.error) == (None, "RuntimeError: Connection closed by peer")
    assert second.name == "tp_all_reduce"


def _lose_a_peer(watched: Watched) -> None:
    recorder = watched.recorder
    inside = recorder.span("tp_all_reduce", group="tensor")
    detail = recorder.span("tp_transfer", op="all_reduce")
    with recorder.step(1), recorder.span("grad_sync", op="finish"), inside, detail:
        watched.wait_for(1)
        raise RuntimeError("Connection closed by peer")


def test_an_error_of_a_computation_is_no_wait(watched: Watched) -> None:
    with pytest.raises(ValueError, match="own"), watched.recorder.span("forward"):
        raise ValueError("its own")
    assert watched.told() == []


WORK: list[Callable[[Recorder], list[OpenSpan]]] = [
    lambda r: [r.span("forward", chunk=0, micro_batch=0)],
    lambda r: [r.span("grad_sync", op="finish"), r.span("grad_norm")],
    lambda r: [r.span("tp_column_backward", group="tensor"), r.span("op_backward")],
    lambda r: [r.span("checkpoint", op="save", host=True)],
    lambda r: [],
]


@pytest.mark.parametrize("spans", WORK)
def test_who_computes_waits_for_nobody(spans: Callable[[Recorder], list[OpenSpan]]) -> None:
    recorder = _host()
    opened = [span.start() for span in spans(recorder)]
    assert standing(recorder.under_way()) is None
    for span in reversed(opened):
        span.end()


def test_where_waits_belong() -> None:
    recorder = _host()
    with recorder.step(4):
        for m in (0, 1):
            fields: dict[str, Any] = {
                "group": "0->1 activation",
                "op": "activation",
                "chunk": 1,
                "micro_batch": m,
            }
            with recorder.span("recv", **fields):
                pass
        with recorder.span("pp_wait", op="RA", chunk=1, micro_batch=0):
            _is(recorder, "0->1 activation", 1, "recv")
        for name, op, group in (("grad_sync", "reduce_scatter", "data"), ("w", "sum", "world")):
            with recorder.span(name, op=op, group=group):
                pass
        expected = {"grad_sync": ("data", 1), "world_sums": ("world", 1), "norm_sum": (None, None)}
        for (name, what), (of, phase) in WAITS.items():
            if name in expected:
                with recorder.span(name, op=what):
                    _is(recorder, expected[name][0] or of, expected[name][1], phase)
        with recorder.span("pp_finish"):
            _is(recorder, "pipeline", None, "send")


def _is(recorder: Recorder, group: str, seq: int | None, phase: str) -> Standing:
    found = standing(recorder.under_way())
    assert found is not None
    assert (found.group, found.seq, found.phase, found.step) == (group, seq, phase, 4)
    return found


def test_peers() -> None:
    assert peers(MESH, 3, "tensor") == (2,)
    assert peers(MESH, 3, "data") == (1,)
    assert peers(MESH, 3, "0->1 activation") == (7,)
    assert peers(MESH, 7, "0->1 activation") == (3,)
    assert peers(MESH, 3, "1->0 gradient") == (7,)
    assert peers(MESH, 3, "world") == (0, 1, 2, 4, 5, 6, 7)


# ---------------------------------------------------------------- a device behind its host


def _host() -> Recorder:
    return Recorder(MonotonicClock(), lambda _event: None)


def _device() -> tuple[Recorder, FakeClock]:
    clock = FakeClock()
    return Recorder(clock, lambda _event: None), clock


def _two_steps(recorder: Recorder, clock: FakeClock) -> dict[tuple[int, str], tuple[int, int]]:
    """The host hands out two steps; marks (first, last) of each span by step and name."""
    marks = {}
    for step in (1, 2):
        with recorder.step(step):
            for name, fields in (
                ("forward", {"chunk": 0, "micro_batch": 3}),
                ("grad_sync", {"op": "reduce_scatter", "group": "data"}),
                ("world_sums", {"op": "all_reduce", "group": "world"}),
            ):
                first = clock.now + 10
                with recorder.span(name, **fields):
                    if name == "forward":
                        with recorder.span("tp_gather", group="tensor"):
                            pass
                        marks[step, "tp_gather"] = (first + 10, first + 20)
                marks[step, name] = (first, clock.now)
            with recorder.span("world_sums", op="wait"):
                pass
            marks[step, "wait"] = (clock.now - 10, clock.now)
    return marks


@pytest.mark.parametrize(
    ("where", "group", "seq", "posted"),
    [
        ((1, "tp_gather"), "tensor", 1, {"tensor": 1, "data": 0, "world": 0}),
        ((1, "grad_sync"), "data", 1, {"tensor": 1, "data": 1, "world": 0}),
        ((1, "wait"), "world", 1, {"tensor": 1, "data": 1, "world": 1}),
        ((2, "tp_gather"), "tensor", 2, {"tensor": 2, "data": 1, "world": 1}),
        ((2, "wait"), "world", 2, {"tensor": 2, "data": 2, "world": 2}),
    ],
)
def test_a_device_stands_behind_its_host(
    where: tuple[int, str], group: str, seq: int, posted: dict[str, int]
) -> None:
    recorder, clock = _device()
    clock.done = 0
    marks = _two_steps(recorder, clock)
    clock.done = marks[where][0]
    found = standing(recorder.under_way())
    assert found is not None
    assert (found.group, found.seq, found.posted) == (group, seq, posted)
    assert found.since_ns == marks[where][0]
    if group == "tensor":
        assert (found.phase, found.chunk, found.micro_batch) == ("forward", 0, 3)


def test_a_device_that_computes_or_is_idle_waits_for_nobody() -> None:
    recorder, clock = _device()
    clock.done = 0
    marks = _two_steps(recorder, clock)
    clock.done = marks[1, "forward"][0]
    assert standing(recorder.under_way()) is None
    clock.done = marks[1, "tp_gather"][1]
    assert standing(recorder.under_way()) is None, "behind the gather, inside the forward"
    clock.done = float("inf")
    assert standing(recorder.under_way()) is None
    with recorder.span("checkpoint", host=True):
        assert standing(recorder.under_way()) is None
        with recorder.span("agreement", group="world", host=True):
            found = standing(recorder.under_way())
            assert found is not None
            assert (found.span.name, found.group, found.seq) == ("agreement", "world", 3)
            assert found.since_ns == found.span.since_ns, "the host's clock"


def test_marks_are_asked_for_only_where_no_step_becomes_known(tmp_path: Path) -> None:
    clock, events = FakeClock(), list[Event]()
    recorder = Recorder(clock, events.append)
    with LineWriter(tmp_path / "rank.jsonl") as writer:
        looker: Any = Deadline(recorder, writer, MESH, after_s=1.0)
        clock.done = 0
        marks = _two_steps(recorder, clock)
        queries, now_ns = clock.num_queries, time.monotonic_ns()
        looker._look(now_ns)
        looker._look(now_ns + 900_000_000)
        assert clock.num_queries == queries
        looker._look(now_ns + 1_100_000_000)
        assert clock.num_queries > queries
        clock.done = marks[1, "grad_sync"][0]
        for _ in range(2):
            looker._look(now_ns + 1_200_000_000)
        (told,) = read_events(writer.path)
        assert isinstance(told, Ongoing)
        assert (told.group, told.seq, told.op) == ("data", 1, "reduce_scatter")
