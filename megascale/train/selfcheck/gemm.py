"""Speed of matrix products: fp32 on the CPU's cores, bf16 on every GPU; the product is checked.

On a CPU: one thread on each of a few cores in turn, FLOPs over the CPU time that it got, the best
of many short products; the median over the cores. So work beside the check does not make a healthy
node look slow (within 5 % of the middle with none to five busy threads a core). On a GPU: random
operands, after a warm-up, the median over rounds, so that a device that throttles shows.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.train.selfcheck.throttle import throttled_share

CPU_SIZE, GPU_SIZE = 512, 8192
CHECKED = 64  # rows and columns
WARM_UP_S = 0.3
ROUND = 10  # products between two events


def run(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """One rate for the CPU, in GFLOP/s, and one a GPU, in TFLOP/s.

    throttled_share  of the periods since this process's start in which a CPU quota stopped it

    arguments  cpu_kind; seconds: a device; cores: of the CPU, at most
    Raises ValueError for a wrong product.
    """
    seconds = float(arguments["seconds"])
    tell("cpu")
    rates = [
        {
            "at": "cpu",
            "class": "gemm_fp32_core_gflops",
            "kind": arguments["cpu_kind"],
            "value": _cpu_rate(seconds, int(arguments["cores"])),
            "unit": "GFLOP/s",
        }
    ]
    throttled = throttled_share()
    for index in range(torch.cuda.device_count()):
        tell(f"cuda:{index}")
        device = torch.device("cuda", index)
        rates.append(
            {
                "at": f"cuda:{index}",
                "class": "gemm_bf16_tflops",
                "kind": torch.cuda.get_device_name(device),
                "value": _gpu_rate(device, seconds),
            }
        )
    on_gpus = len(rates) > 1
    return {
        "rates": rates,
        "unit": "TFLOP/s" if on_gpus else "GFLOP/s",
        "gpus": len(rates) - 1,
        "throttled_share": throttled,
    }


def _cpu_rate(seconds: float, most_cores: int) -> float:
    """GFLOP/s of one core."""
    torch.set_num_threads(1)
    allowed = sorted(os.sched_getaffinity(0))
    num_cores = min(len(allowed), most_cores)
    a, b, c = _operands(CPU_SIZE, torch.device("cpu"), torch.float32)
    rates = []
    try:
        for number in range(num_cores):
            os.sched_setaffinity(0, {allowed[number * len(allowed) // num_cores]})
            rates.append(_core_rate(a, b, c, seconds / num_cores))
            _check(a, b, c, 1e-4)
            c.fill_(float("nan"))
    finally:
        os.sched_setaffinity(0, allowed)
    return statistics.median(rates)


def _core_rate(a: Tensor, b: Tensor, c: Tensor, seconds: float) -> float:
    best, end = 0.0, time.monotonic() + seconds
    torch.mm(a, b, out=c)
    while True:
        start = time.thread_time()
        torch.mm(a, b, out=c)
        best = max(best, 2 * CPU_SIZE**3 / max(time.thread_time() - start, 1e-9) / 1e9)
        if time.monotonic() >= end:
            return best


def _gpu_rate(device: torch.device, seconds: float) -> float:
    """TFLOP/s."""
    with torch.cuda.device(device):
        a, b, c = _operands(GPU_SIZE, device, torch.bfloat16)
        torch.mm(a, b, out=c)
        _check(a, b, c, 1e-2)
        end = time.monotonic() + WARM_UP_S
        while time.monotonic() < end:
            _round(a, b, c)
        rates: list[float] = []
        end = time.monotonic() + seconds
        while not rates or time.monotonic() < end:
            rates.append(_round(a, b, c))
        _check(a, b, c, 1e-2)
    return statistics.median(rates)


def _round(a: Tensor, b: Tensor, c: Tensor) -> float:
    begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(ROUND):
        torch.mm(a, b, out=c)
    done.record()
    done.synchronize()
    return ROUND * 2 * GPU_SIZE**3 / (begin.elapsed_time(done) * 1e-3) / 1e12


def _operands(size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    return a, b, torch.full_like(a, float("nan"))


def _check(a: Tensor, b: Tensor, c: Tensor, tolerance: float) -> None:
    """Some rows and columns against the CPU in fp64. Raises ValueError."""
    some = slice(0, None, a.shape[0] // CHECKED)
    expected = a[some].cpu().double() @ b[:, some].cpu().double()
    error = (c[some, some].cpu().double() - expected).norm() / expected.norm()
    if not error <= tolerance:  # NaN fails too
        raise ValueError(f"a matrix product on {a.device} is wrong: relative error {error:.3g}")
