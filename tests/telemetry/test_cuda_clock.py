"""The clock of CUDA events, on a device that is simulated: work is queued, its clock runs at its
own rate, and asking too early is an error. On a GPU the same is compared with the host's clock."""

from __future__ import annotations

import itertools
import struct
import time

import numpy as np
import pytest
import torch

from megascale.events import Anchor, Event, Span, Step, Sums
from megascale.parallel.clock import CudaEventClock
from megascale.telemetry.recorder import Recorder


class FakeDevice:
    """One stream. Times in ns of the host's clock; the device's own runs `drift_ppm` faster."""

    def __init__(self, drift_ppm: float = 0.0) -> None:
        self.host_now = 10**15
        self.stream_end = self.host_now
        self.rate = 1 + drift_ppm * 1e-6
        self.num_events = 0
        self.num_waits = 0

    def host_ns(self) -> int:
        self.host_now += 1_000  # every look at the clock takes 1 us
        return self.host_now

    def work(self, duration_ns: int) -> None:
        self.stream_end = max(self.stream_end, self.host_now) + duration_ns

    def wait(self) -> None:
        self.num_waits += 1
        self.host_now = max(self.host_now, self.stream_end)

    def make_event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at: int | None = None

    def record(self) -> None:
        self.at = max(self.device.stream_end, self.device.host_now)

    def query(self) -> bool:
        return self.at is not None and self.at <= self.device.host_now

    def synchronize(self) -> None:
        assert self.at is not None
        self.device.num_waits += 1
        self.device.host_now = max(self.device.host_now, self.at)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query(), "asked for a time that is not known"
        assert end_event.query(), "asked for a time that is not known"
        assert self.at is not None
        assert end_event.at is not None
        milliseconds = (end_event.at - self.at) * self.device.rate / 1e6
        rounded: float = struct.unpack("f", struct.pack("f", milliseconds))[0]
        return rounded


def make(drift_ppm: float = 0.0) -> tuple[CudaEventClock, FakeDevice]:
    device = FakeDevice(drift_ppm)
    clock = CudaEventClock(
        make_event=device.make_event, wait_for_device=device.wait, host_ns=device.host_ns
    )
    device.num_waits = 0
    return clock, device


def test_marks_are_known_once_the_device_has_passed_them() -> None:
    clock, device = make()
    clock.begin_step()
    start = clock.mark()
    queued_at = device.host_now
    device.work(5_000_000)
    end = clock.mark()
    assert clock.ready(start)
    assert not clock.ready(end)
    device.host_now += 5_000_000
    assert clock.ready(end)
    t0_ns, dur_ns = clock.interval(start, end)
    assert dur_ns == 5_000_000
    assert abs(t0_ns - queued_at) <= 1_000  # the anchor's error
    assert device.num_waits == 0


def test_the_chain_of_bases_keeps_microseconds_over_hours() -> None:
    clock, device = make()
    for _ in range(1000):
        clock.begin_step()
        device.work(10_000_000_000)  # float32 milliseconds of 10^7 s would be off by a second
        device.host_now += 10_000_000_000
    at = device.host_now
    start = clock.mark()
    device.work(1_234_567)
    end = clock.mark()
    device.host_now += 2_000_000
    assert clock.ready(end)
    t0_ns, dur_ns = clock.interval(start, end)
    assert dur_ns == pytest.approx(1_234_567, abs=100)
    assert abs(t0_ns - at) < 2_000
    assert device.num_waits == 0


@pytest.mark.parametrize("drift_ppm", [-20.0, 20.0])
def test_anchors_correct_the_drift(drift_ppm: float) -> None:
    clock, device = make(drift_ppm)

    def error_of_a_mark() -> int:
        clock.begin_step()
        mark = clock.mark()
        at = device.host_now
        device.host_now += 1000
        assert clock.ready(mark)
        return clock.interval(mark, mark)[0] - at

    device.host_now += 100_000_000_000
    assert error_of_a_mark() == pytest.approx(drift_ppm * 100_000, rel=0.01)  # 2 ms in 100 s
    clock.anchor()
    assert abs(error_of_a_mark()) < 2_000
    device.host_now += 100_000_000_000  # and the rate holds after the last anchor
    assert abs(error_of_a_mark()) < 3_000
    first, second = clock.anchors(rank=7)
    assert (first.drift_ppm, first.rank, first.clock) == (None, 7, "device")
    assert second.drift_ppm == pytest.approx(drift_ppm, abs=0.1)
    assert second.error_ns <= 1_000
    assert clock.anchors(rank=7) == []


@pytest.mark.parametrize("drift_ppm", [-10.6, 10.6])
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_run_without_anchors_stays_aligned_by_the_waits_of_its_loop(
    drift_ppm: float, is_idle: bool
) -> None:
    """Ten minutes of steps: the loop waits for each, and is woken late, or never has to wait."""
    clock, device = make(drift_ppm)
    random = np.random.default_rng(0)
    worst_ns, step_ns = 0, 60_000_000
    for step in range(10_000):
        clock.begin_step()
        start, launched = clock.mark(), device.host_now
        device.work(step_ns // 2 if is_idle else step_ns)
        done = FakeEvent(device)
        done.record()
        if is_idle:
            device.host_now += step_ns
        reached_ns = None
        if not done.query():
            done.synchronize()
            device.host_now += 3_000 + int(random.exponential(200_000))
            reached_ns = device.host_ns()
        assert clock.ready(start)
        t0_ns, _ = clock.interval(start, start)
        clock.release(start)
        clock.reached(done, reached_ns)
        if step > 3000:  # two anchors, from which on the rate is known
            worst_ns = max(worst_ns, abs(t0_ns - launched))
    assert worst_ns < 40_000, "without anchors it is 6 ms"
    anchors = clock.anchors(rank=0)
    assert all(anchor.error_ns < 200_000 for anchor in anchors)
    if is_idle:
        assert len(anchors) == 11  # one when it was made, and every minute
    else:
        assert len(anchors) > 50
        assert anchors[-1].drift_ppm == pytest.approx(drift_ppm, abs=0.2)


def test_events_are_used_again() -> None:
    clock, device = make()
    events: list[Event] = []
    recorder = Recorder(clock, events.append, span_interval=1)
    counts = []
    for step in range(1, 21):
        with recorder.step(step):
            for _ in range(10):
                with recorder.span("forward"):
                    device.work(1_000_000)
        device.host_now += 4_000_000  # the device is 1.5 steps behind, and catches up
        if step % 2 == 0:
            device.host_now += 16_000_000
        counts.append(device.num_events - step)  # without the step's base
    assert counts[3] == counts[-1]
    assert device.num_waits == 0


def test_a_recorder_on_a_lagging_device() -> None:
    clock, device = make()
    events: list[Event] = []
    recorder = Recorder(clock, events.append, rank=2, span_interval=1)
    for step in (1, 2, 3):
        with recorder.step(step):
            for micro_batch in range(2):
                with recorder.span("forward", micro_batch=micro_batch):
                    device.work(3_000_000)
    assert [e for e in events if not isinstance(e, Anchor)] == []
    recorder.close()
    spans = [e for e in events if isinstance(e, Span)]
    assert [(s.step, s.micro_batch, s.dur_ns) for s in spans] == [
        (step, micro_batch, 3_000_000) for step in (1, 2, 3) for micro_batch in (0, 1)
    ]
    for before, after in itertools.pairwise(spans):
        assert after.t0_ns - before.t0_ns == pytest.approx(3_000_000, abs=5)
    assert [e.sums["forward"] for e in events if isinstance(e, Sums)] == [
        {"total_ns": 6_000_000, "count": 2}
    ] * 3
    assert [(e.dur_ns, e.clock) for e in events if isinstance(e, Step)] == [
        (6_000_000, "device")
    ] * 3
    assert len([e for e in events if isinstance(e, Anchor)]) == 2


@pytest.mark.gpu
def test_on_a_gpu_the_host_agrees() -> None:
    clock = CudaEventClock()
    events: list[Event] = []
    recorder = Recorder(clock, events.append, span_interval=1)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    a @ a
    for step in range(1, 4):
        torch.cuda.synchronize()
        with recorder.step(step):
            host_start = time.monotonic_ns()
            with recorder.span("matmul"):
                for _ in range(50):
                    a @ a
            torch.cuda.synchronize()
            host_end = time.monotonic_ns()
    recorder.close()
    span = [e for e in events if isinstance(e, Span)][-1]
    assert abs(span.t0_ns - host_start) < 500_000
    assert abs(span.t0_ns + span.dur_ns - host_end) < 500_000
    assert span.dur_ns > 50 * 2 * 4096**3 / 2e15 * 1e9  # faster than any device would be wrong
    for anchor in events:
        if isinstance(anchor, Anchor):
            assert anchor.error_ns < 200_000
