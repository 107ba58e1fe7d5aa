"""Long runs of the operators: changing sizes, late ranks, several groups and streams, graphs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.flux.gpu_calls import MILLISECOND, SCALES, Calls, Delays, Memory, Verdict
from tests.flux.gpu_cases import Case, inputs, settle, wrong

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(240)]

MODES = ("fused", "chunked", "auto", "reference")
NUM_CALLS = {"fused": 1000, "chunked": 1000, "auto": 300, "reference": 100}


def _rows(world_size: int) -> list[int]:
    return [1, 7, 63, 64 * world_size, 129, 1000, 128 * world_size + 1, 512 * world_size, 4096]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _stress(rank: int, world_size: int) -> list[str]:
    failures = []
    for mode in MODES:
        calls = Calls(_world(), mode, {})
        failures += calls.prepare(_rows(world_size))
        for number, phase in enumerate((_changing_sizes, _a_late_rank, _two_streams)):
            verdict, shared = Verdict(), random.Random(number)
            problems = phase(calls, shared, verdict)
            settle()
            failures += verdict.failures(f"rank {rank}, {mode}, {phase.__name__}")
            failures += [f"rank {rank}, {mode}: {problem}" for problem in problems]
    return failures


def _changing_sizes(calls: Calls, shared: random.Random, verdict: Verdict) -> list[str]:
    """A thousand calls of all operators in turn; memory is as before."""
    delays, before = Delays(calls.rank), None
    for number in range(NUM_CALLS[calls.mode]):
        if number == 60:
            before = Memory.now()
        delays.maybe()
        calls.call_any(shared, verdict)
    assert before is not None
    growth = before.growth(Memory.now())
    return [growth] if growth else []


def _a_late_rank(calls: Calls, shared: random.Random, verdict: Verdict) -> list[str]:
    """Each rank in turn is late by more than several calls take."""
    for late in range(calls.world_size):
        for number in range(7):
            if calls.rank == late and number in (0, 4):
                torch.cuda._sleep(10 * MILLISECOND)
            calls.call_any(shared, verdict)
    return []


def _two_streams(calls: Calls, shared: random.Random, verdict: Verdict) -> list[str]:
    """The current stream changes between calls; each sees what the last left."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number in range(40):
        with torch.cuda.stream(streams[number % 2]):
            streams[number % 2].wait_stream(streams[1 - number % 2])  # the verdict is one tensor
            calls.call_any(shared, verdict)
    torch.cuda.synchronize()
    return []


def test_a_thousand_calls_with_changing_sizes_and_late_ranks() -> None:
    found = run_ranks(_stress, torch.cuda.device_count(), cuda=True, timeout_s=230)
    assert [line for lines in found for line in lines] == []


def _one_queue(rank: int, world_size: int) -> list[str]:
    failures = []
    for mode in ("fused", "chunked"):
        calls = Calls(_world(), mode, {})
        failures += calls.prepare([64 * world_size, 1001, 2048 * world_size])
        verdict, shared, delays = Verdict(), random.Random(3), Delays(rank)
        for _ in range(150):
            delays.maybe()
            calls.call_any(shared, verdict)
        settle()
        failures += verdict.failures(f"rank {rank}, {mode}, one hardware queue")
    return failures


def test_all_streams_of_a_rank_share_one_hardware_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs have it that were written for Megatron-LM: a wait stands before what follows."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = run_ranks(_one_queue, torch.cuda.device_count(), cuda=True, timeout_s=110)
    assert [line for lines in found for line in lines] == []


def _groups(rank: int, world_size: int) -> list[str]:
    """All ranks in one group and half of them (two: all of them again) in another, in turn."""
    half = max(2, world_size // 2)
    others = [
        dist.new_group(list(range(s, s + half))) for s in range(0, world_size - half + 1, half)
    ]
    failures = []
    for mode in ("fused", "chunked"):
        whole = Calls(_world(), mode, {})
        failures += whole.prepare([64 * world_size, 1000])
        parts = [Calls(g, mode, {}) for g in others if dist.get_rank(g) >= 0]
        for part in parts:
            failures += part.prepare([129, 512])
        verdict, delays = Verdict(), Delays(rank)
        of_all, of_part = random.Random(5), random.Random(6)
        for _ in range(100):
            delays.maybe()
            whole.call_any(of_all, verdict)
            for part in parts:
                part.call_any(of_part, verdict)
        settle()
        failures += verdict.failures(f"rank {rank}, {mode}, two groups")
        failures += _growth(dist.new_group(list(range(world_size))), mode)
    return failures


def _growth(group: dist.ProcessGroup, mode: str) -> list[str]:
    """Symmetric memory grows while rows gathered in the old one are still to be read."""
    calls = Calls(group, mode, {})
    small = Case("ag_gemm", 64 * calls.world_size, 520, 264)
    device = torch.device("cuda", torch.cuda.current_device())
    given = inputs(small, calls.rank, calls.world_size, device, 1)
    gather = calls.operators["ag_gemm"]
    _, held = gather(given.x, given.weights[0], return_gathered=True)
    problem = _large(calls, 4096)
    if not torch.equal(held, given.gathered):
        problem += " held rows are wrong"
    started = gather.start_all_gather(given.x)
    problem += _large(calls, 16384)
    if not torch.equal(started(), given.gathered):
        problem += " started rows are wrong"
    settle()
    return [f"rank {calls.rank}, {mode}, growth: {problem}"] if problem else []


def _large(calls: Calls, m: int) -> str:
    """One call that needs more memory than any before it."""
    case = Case("gemm_rs", m, 1032, 264)
    device = torch.device("cuda", torch.cuda.current_device())
    given = inputs(case, calls.rank, calls.world_size, device, 2)
    return wrong(case, [calls.call(case.op, given, case, 1.0)], given)


def test_two_groups_take_turns() -> None:
    found = run_ranks(_groups, torch.cuda.device_count(), cuda=True, timeout_s=110)
    assert [line for lines in found for line in lines] == []


class _Layers:
    """Two layers of a tensor-parallel MLP: five flux calls, which the slots do not divide."""

    def __init__(self, calls: Calls, m: int, seed: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        up = Case("ag_gemm", m, 256, 512)
        self.given = inputs(up, calls.rank, calls.world_size, device, seed)
        down = Case("gemm_rs", m, 512, 256)
        self.down = inputs(down, calls.rank, calls.world_size, device, seed).weights[0]
        self._calls, self._m = calls, m
        self.wanted: Tensor | None = None  # of x itself

    def __call__(self, x: Tensor) -> Tensor:
        ops, up = self._calls.operators, self.given.weights[0]
        reduced = "gemm_ar" in self._calls.ops
        for _ in range(2):
            x = ops["gemm_rs"](ops["ag_gemm"](x, up, num_rows=self._m), self.down) * 0.05
        h_TN: Tensor = ops["ag_gemm"](x, up, num_rows=self._m)
        return ops["gemm_ar"](h_TN, self.down) if reduced else h_TN


def _captured(layers: _Layers) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """(graph, its input, its output)."""
    x, stream = layers.given.x.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layers(x)
    settle()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog asks for events in its own thread meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y = layers(x)
    settle()
    return graph, x, y


def _graphs(rank: int, world_size: int) -> list[str]:
    failures = []
    for mode in ("fused", "chunked", "auto"):
        plain, calls = Calls(_world(), "reference", {}), Calls(_world(), mode, {})
        runs: list[Callable[[float], Tensor]] = []
        wanted: list[Tensor] = []
        # the second needs more symmetric memory than the first graph has captured
        for seed, m in enumerate((64 * world_size, 4001 + 4000 * MODES.index(mode))):
            layers = _Layers(calls, m, 3000 + seed)
            reference = _Layers(plain, m, 3000 + seed)
            reference._calls.ops = calls.ops
            graph, x, y = _captured(layers)
            wanted += [reference(layers.given.x).float()] * 2
            runs += [_replay(graph, x, layers.given.x, y), _eager(layers)]
        verdict, shared, delays = Verdict(), random.Random(9), Delays(rank)
        order = [0] * 100 + [shared.randrange(len(runs)) for _ in range(100)]
        for which in order:
            delays.maybe()
            scale = shared.choice(SCALES)
            verdict.check(runs[which](scale), wanted[which], scale)
        settle()
        failures += verdict.failures(f"rank {rank}, {mode}, graphs")
    return failures


def _replay(
    graph: torch.cuda.CUDAGraph, x: Tensor, source: Tensor, y: Tensor
) -> Callable[[float], Tensor]:
    def run(scale: float) -> Tensor:
        x.copy_(source * scale)
        graph.replay()
        return y

    return run


def _eager(layers: _Layers) -> Callable[[float], Tensor]:
    return lambda scale: layers(layers.given.x * scale)


def test_graphs_are_replayed_and_mixed_with_eager_calls() -> None:
    found = run_ranks(_graphs, torch.cuda.device_count(), cuda=True, timeout_s=110)
    assert [line for lines in found for line in lines] == []
