"""Measures one device's work: matrix products, attention, passes over memory, a kernel's launch.

Operands are random: a GPU's clock under load depends on the bits that it multiplies. Each kind of
operation is checked against a plain computation before it is timed. Weight gradients are added to
fp32 main gradients, as a training step does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megascale.config import OptimizerConfig
from megascale.flux.timing import WARM_UP_CALLS, HostTimer, Run, calls_of_burst
from megascale.ops.activation import activation
from megascale.ops.attention import attention, attention_reference
from megascale.ops.linear import accumulate_weight_gradient
from megascale.ops.norm import residual_norm
from megascale.optim import Flat, Reductions, Segment, build_optimizer
from megascale.plan.machine.samples import AttentionSample, GemmSample, MemorySample
from megascale.plan.work.operations import Attention, Direction, Gemm

ROUNDS = 3
MOST_ERROR = 2e-2  # relative, in the 2-norm: bf16
NORM_WIDTH = 4096
SUSTAINED_S = 2.0
LEAST_S = 1e-7  # of a difference of two times
BURST_MS, MOST_CALLS = 3.0, 20
CYCLES_PER_S = 1.98e9  # of a sleep: an H200's fastest clock; a slower one sleeps longer
LOW = torch.bfloat16


class Stopwatch:
    """Seconds of a call, the median of some bursts.

    On a GPU a burst is queued whole behind a sleep of the device, so that the time is the device's
    without the host's launches, which are priced by themselves. A graph would do as well, but no
    backward of autograd can be captured whose inputs were made outside.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, run: Run) -> float:
        if self.device.type != "cuda":
            probe = HostTimer(None).prepare(run)
            return statistics.median(probe() for _ in range(ROUNDS)) / 1e3
        for _ in range(WARM_UP_CALLS):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            run()
            host_s = time.perf_counter() - start
        once_s = self._burst_s(run, 1, host_s)
        num_calls = calls_of_burst(1e3 * once_s, BURST_MS, MOST_CALLS)
        return statistics.median(self._burst_s(run, num_calls, host_s) for _ in range(ROUNDS))

    def _burst_s(self, run: Run, num_calls: int, host_s: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        lead_s = 1e-4 + 1.5 * host_s * num_calls
        torch.cuda._sleep(int(CYCLES_PER_S * lead_s))
        start.record()
        for _ in range(num_calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / num_calls


class Operands:
    """Views of one random flat each, so that no size allocates or fills anything."""

    def __init__(self, gemms: Iterable[Gemm], device: torch.device) -> None:
        sizes = [_matrices(gemm) for gemm in gemms]
        generator = torch.Generator(device).manual_seed(0)
        self._flats = [
            torch.randn(max(a * b for a, b in part), generator=generator, device=device).to(LOW)
            for part in zip(*(size[:2] for size in sizes), strict=True)
        ]
        largest = max(gemm.rows * gemm.columns for gemm in gemms)
        self._result = torch.zeros(largest, device=device)

    def run(self, gemm: Gemm) -> tuple[Run, Tensor]:
        """A call that computes the product, and what it writes or adds to."""
        first, second = (
            flat[: a * b].view(a, b)
            for flat, (a, b) in zip(self._flats, _matrices(gemm), strict=True)
        )
        if gemm.direction is Direction.WGRAD:
            weight = nn.Parameter(torch.empty(0, dtype=LOW, device=first.device))
            main = self._result[: gemm.rows * gemm.columns].view(gemm.rows, gemm.columns)
            weight.main_grad = main  # type: ignore[attr-defined]
            return (lambda: accumulate_weight_gradient(weight, first, second)), main
        result = torch.empty(gemm.rows, gemm.columns, dtype=LOW, device=first.device)
        if gemm.direction is Direction.FORWARD:
            return (lambda: torch.mm(first, second.t(), out=result)), result
        return (lambda: torch.mm(first, second, out=result)), result

    def expected(self, gemm: Gemm, num_rows: int) -> Tensor:
        """The first rows of the product, in fp32."""
        first, second = (
            flat[: a * b].view(a, b)
            for flat, (a, b) in zip(self._flats, _matrices(gemm), strict=True)
        )
        match gemm.direction:
            case Direction.WGRAD:
                return first[:, :num_rows].t().float() @ second.float()
            case Direction.FORWARD:
                return first[:num_rows].float() @ second.t().float()
            case _:
                return first[:num_rows].float() @ second.float()


def _matrices(gemm: Gemm) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the two operands as they lie in memory."""
    rows, columns, depth = gemm.rows, gemm.columns, gemm.depth
    match gemm.direction:
        case Direction.FORWARD:  # x [rows, depth], weight [columns, depth]
            return (rows, depth), (columns, depth)
        case Direction.DGRAD:  # gradient [rows, depth], weight [depth, columns]
            return (rows, depth), (depth, columns)
        case _:  # gradient [depth, rows], x [depth, columns]
            return (depth, rows), (depth, columns)


def measure_gemms(
    gemms: list[Gemm], watch: Stopwatch, in_time: Callable[[], bool]
) -> list[GemmSample]:
    """A sample of each product that there was time for. AssertionError where values are wrong."""
    operands = Operands(gemms, watch.device)
    for direction in Direction:
        _check_gemm(operands, min((g for g in gemms if g.direction is direction), key=_flops))
    samples = []
    for gemm in gemms:
        if not in_time():
            break
        run, _ = operands.run(gemm)
        samples.append(
            GemmSample(
                rows=gemm.rows,
                columns=gemm.columns,
                depth=gemm.depth,
                direction=gemm.direction,
                seconds=watch.seconds(run),
            )
        )
    return samples


def _flops(gemm: Gemm) -> float:
    return gemm.flops


def _check_gemm(operands: Operands, gemm: Gemm) -> None:
    run, result = operands.run(gemm)
    result.zero_()
    run()
    _check(f"{gemm}", result[:16].float(), operands.expected(gemm, 16))


def _check(name: str, got: Tensor, expected: Tensor) -> None:
    error = float((got - expected).norm() / expected.norm())
    assert error <= MOST_ERROR, f"{name}: relative error {error:.1e} over {MOST_ERROR:.0e}"


def measure_sustained(gemm: Gemm, watch: Stopwatch) -> float:
    """Share of a burst's rate that products keep which run for seconds on end (power limit)."""
    run, _ = Operands([gemm], watch.device).run(gemm)
    burst_s = watch.seconds(run)
    num_calls = max(10, int(SUSTAINED_S / burst_s))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(num_calls):
        if i == num_calls // 2:
            start.record()
        run()
    end.record()
    end.synchronize()
    on_end_s = start.elapsed_time(end) / 1e3 / (num_calls - num_calls // 2)
    return min(1.0, burst_s / on_end_s)


def measure_attentions(
    cores: list[Attention], watch: Stopwatch, in_time: Callable[[], bool]
) -> list[AttentionSample]:
    """Forward and backward of each core that there was time for."""
    samples = []
    for core in cores:
        if not in_time():
            break
        forward, both = _attention_runs(core, watch.device)
        forward_s = watch.seconds(forward)
        for backward, seconds in ((False, forward_s), (True, watch.seconds(both) - forward_s)):
            samples.append(
                AttentionSample(
                    sequences=core.sequences,
                    seq_len=core.seq_len,
                    heads=core.heads,
                    kv_heads=core.kv_heads,
                    head_dim=core.head_dim,
                    window=core.window,
                    backward=backward,
                    seconds=max(seconds, LEAST_S),
                )
            )
    return samples


def _attention_runs(core: Attention, device: torch.device) -> tuple[Run, Run]:
    """The forward, and forward with backward."""
    if core.window is not None:
        torch.compiler.reset()  # more sizes than it compiles for fall back to something slow
    generator = torch.Generator(device).manual_seed(1)
    q, k, v = (
        torch.randn(
            (core.sequences, core.seq_len, heads, core.head_dim), generator=generator, device=device
        )
        .to(LOW)
        .requires_grad_()
        for heads in (core.heads, core.kv_heads, core.kv_heads)
    )
    y = attention(q, k, v, window=core.window)
    first = [x[:1, :128].detach().float() for x in (q, k, v)]
    expected = attention_reference(*first, window=core.window)
    _check(f"{core}", y[:1, :128].detach().float(), expected)
    return _runs(lambda: attention(q, k, v, window=core.window), (q, k, v))


def _runs(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> tuple[Run, Run]:
    """A forward with what its backward needs, and the same with the backward behind it."""
    gradient = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(forward(), inputs, gradient)


def measure_passes(sizes: Iterable[int], watch: Stopwatch) -> list[MemorySample]:
    """Copies, norms, activations and the optimizer, of about so many bytes read and written."""
    samples = []
    for num_bytes in sizes:
        for name, moved_bytes, seconds in _passes(num_bytes, watch):
            sample = MemorySample(name=name, num_bytes=moved_bytes, seconds=max(seconds, LEAST_S))
            samples.append(sample)
    return samples


def _passes(num_bytes: int, watch: Stopwatch) -> Iterator[tuple[str, float, float]]:
    """(name, bytes read and written, seconds)."""
    rows = max(1, num_bytes // (4 * NORM_WIDTH))  # read and written once each
    x, weight = (
        torch.randn(shape, device=watch.device).to(LOW).requires_grad_()
        for shape in ((rows, NORM_WIDTH), (NORM_WIDTH,))
    )
    bias = torch.zeros_like(weight).requires_grad_()
    one = 2.0 * x.numel()
    copied, source = torch.empty_like(x), x.detach()
    yield "copy", 2 * one, watch.seconds(lambda: copied.copy_(source))
    _, y = residual_norm(x, None, weight, bias, 1e-5)
    plain = F.layer_norm(x.detach().float(), (NORM_WIDTH,)) * weight.detach().float()
    _check("norm", y.detach().float(), plain)
    cases: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]] = {
        "norm": (lambda: residual_norm(x, None, weight, bias, 1e-5)[1], (x, weight, bias)),
        "activation": (lambda: activation("gelu_tanh", x), (x,)),
    }
    for name, (forward, inputs) in cases.items():
        once, both = _runs(forward, inputs)
        forward_s = watch.seconds(once)
        yield name, 2 * one, forward_s
        yield f"{name}_backward", 3 * one, watch.seconds(both) - forward_s
    run, moved_bytes = _adamw(num_bytes, watch.device)
    yield "adamw", moved_bytes, watch.seconds(run)


_ADAMW_BYTES = 34  # an element: 4 of the squares; 30 of the update (`benchmarks.optimizer`)


def _adamw(num_bytes: int, device: torch.device) -> tuple[Run, float]:
    elements = max(1024, num_bytes // _ADAMW_BYTES // 64 * 64)
    master, grad = (torch.randn(elements, device=device) for _ in range(2))
    segment = Segment("weight", master, grad, decay=True)
    flat = Flat(master, grad, True, [segment], master.to(LOW))
    optimizer = build_optimizer(OptimizerConfig(), [flat], Reductions(("weight",)))
    return (lambda: optimizer.step(1e-6, 1.0)), float(_ADAMW_BYTES * elements)


def measure_launch(device: torch.device) -> float:
    """Host seconds of one kernel's launch in PyTorch: a small addition, again and again."""
    small = torch.zeros(16, device=device)
    num_calls = 2000
    for _ in range(100):
        small.add_(1.0)
    start = time.perf_counter()
    for _ in range(num_calls):
        small.add_(1.0)
    return (time.perf_counter() - start) / num_calls
