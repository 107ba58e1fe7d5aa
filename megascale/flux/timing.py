"""How long a call takes: probes that the tuner and the bench run in turn.

A timer makes a probe of a call; running the probe once is one burst of back-to-back calls and gives
the time of one of them. Bursts of different methods alternate (A B C A B C), because clocks and
temperature drift: methods timed one after another differ by up to ten per cent for that alone.

What a burst measures is the steady state of a program that calls the operator again and again.
Where the device is the bottleneck the host runs ahead, so a burst begins behind a short sleep on
the device; where the host is the bottleneck there is none, and its time shows.

Cost: preparing warms up (compiles) and takes three calls; a burst takes `burst_ms` or one call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import torch
import torch.distributed as dist

Run = Callable[[], object]
Probe = Callable[[], float]

WARM_UP_CALLS = 3


class Timer(Protocol):
    """Makes probes. All ranks prepare the same calls in the same order, and probe in the same."""

    def prepare(self, run: Run) -> Probe:
        """Warm `run` up; the probe gives milliseconds a call."""
        ...


def interleave(probes: Mapping[str, Probe], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each probe in each round; one burst of each a round."""
    samples: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(num_rounds):
        for name, probe in probes.items():
            samples[name].append(probe())
    return samples


def slowest_rank(values: Mapping[str, float], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Each value's maximum over the ranks; equal on all of them. Names as on every rank."""
    if group is None or group.size() == 1 or not values:
        return dict(values)
    numbers = torch.tensor(list(values.values()), dtype=torch.float64, device=vote_device(group))
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(values, numbers.tolist(), strict=True))


def medians(
    samples: Mapping[str, list[float]], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """The median of the rounds, then the maximum over the ranks."""
    return slowest_rank({name: statistics.median(times) for name, times in samples.items()}, group)


def vote_device(group: dist.ProcessGroup) -> torch.device:
    """Where a small tensor must be for a collective of this group."""
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class HostTimer:
    """For CPU: the clock of the host around a burst."""

    def __init__(self, group: dist.ProcessGroup | None, num_calls: int = 3) -> None:
        self._group = group
        self._num_calls = num_calls

    def prepare(self, run: Run) -> Probe:
        run()

        def probe() -> float:
            if self._group is not None:
                dist.barrier(self._group)
            start = time.perf_counter()
            for _ in range(self._num_calls):
                run()
            return (time.perf_counter() - start) * 1e3 / self._num_calls

        return probe


class EagerTimer:
    """Bursts of eager calls between two events of the current stream."""

    LEAD_CYCLES = 1_200_000  # of the sleep: 0.6 ms at 1.98 GHz, more than it takes to launch a call

    def __init__(
        self, group: dist.ProcessGroup | None, burst_ms: float = 4.0, most_calls: int = 50
    ) -> None:
        self._group = group
        self._burst_ms = burst_ms
        self._most_calls = most_calls
        self._token = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))

    def prepare(self, run: Run) -> Probe:
        for _ in range(WARM_UP_CALLS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            host_ms = (time.perf_counter() - start) * 1e3
        found = {"device": self._burst(run, 1, lead=True), "host": host_ms}
        found = slowest_rank(found, self._group)
        num_calls = calls_of_burst(found["device"], self._burst_ms, self._most_calls)
        lead = found["device"] > found["host"]
        return lambda: self._burst(run, num_calls, lead=lead)

    def _burst(self, run: Run, num_calls: int, *, lead: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if lead:
            torch.cuda._sleep(self.LEAD_CYCLES)
        if self._group is not None:
            dist.all_reduce(self._token, group=self._group)  # ranks leave it together
        start.record()
        for _ in range(num_calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / num_calls


class GraphTimer:
    """Replays of a CUDA graph that holds a burst of calls: what the device alone takes.

    The graphs of one timer share their memory: only one replays at a time, and nobody reads what
    they computed.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, burst_ms: float = 2.0, most_calls: int = 40
    ) -> None:
        self._eager = EagerTimer(group)
        self._group = group
        self._burst_ms = burst_ms
        self._most_calls = most_calls
        self._pool = torch.cuda.graph_pool_handle()
        # A pool that no graph uses any more cannot be used again: this one stays.
        self._anchor = self._capture(lambda: self._eager._token.add_(0), 1)

    def prepare(self, run: Run) -> Probe:
        for _ in range(WARM_UP_CALLS):
            run()
        estimate = {"ms": self._eager._burst(run, 4, lead=True)}
        estimate_ms = slowest_rank(estimate, self._group)["ms"]
        num_calls = calls_of_burst(estimate_ms, self._burst_ms, self._most_calls)
        graph = self._capture(run, num_calls)
        self._eager._burst(graph.replay, 1, lead=False)
        return lambda: self._eager._burst(graph.replay, 1, lead=True) / num_calls

    def _capture(self, run: Run, num_calls: int) -> torch.cuda.CUDAGraph:
        """By hand: torch's context manager empties the allocator's cache, for every method anew."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                for _ in range(num_calls):
                    run()
            except BaseException:
                with suppress(RuntimeError):  # of the capture that is now none
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


def calls_of_burst(call_ms: float, burst_ms: float, most_calls: int) -> int:
    """How many calls fill a burst: at least one, an even number where it is more."""
    wanted = min(most_calls, int(burst_ms / max(call_ms, 1e-4)))
    return max(1, wanted - wanted % 2)
