"""The GEMM engine of the fused operators against cuBLAS, on one GPU, without communication.

    python -m benchmarks.flux_gemm [--rows 2048,4096] [--shapes llama70b-o]

A fused operator can hide its communication and still lose if its GEMM is slower than cuBLAS, so
this ratio is the first one to look at. Shapes are those of `megascale bench flux` at TP 2. Methods
are interleaved round by round; values are checked before timing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import writable_file
from megascale.env import installed_versions

SHAPES = {  # n, k of one of two ranks
    "gpt3-fc1": (24576, 12288),
    "gpt3-fc2": (12288, 24576),
    "llama70b-fc1": (28672, 8192),
    "llama70b-fc2": (8192, 14336),
    "llama70b-qkv": (5120, 8192),
    "llama70b-o": (8192, 4096),
}


@dataclass(frozen=True)
class Tiles:
    """A configuration of the engine."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_stages: int = 3
    chunks: int = 1

    @property
    def name(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{tile} s{self.num_stages} g{self.group_m}"


CONFIGS = [
    Tiles(),
    Tiles(group_m=16),
    Tiles(group_m=4),
    Tiles(block_m=256, block_n=128),
    Tiles(block_n=128, num_stages=5),
]


def main() -> None:
    """Print the ratios; append a row a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1024,2048,4096,8192")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=writable_file)
    arguments = parser.parse_args()
    for shape in arguments.shapes.split(","):
        for m in map(int, arguments.rows.split(",")):
            row = measure(shape, m, arguments.rounds)
            row["commit"] = arguments.commit
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def measure(shape: str, m: int, rounds: int) -> dict[str, Any]:
    """One row: cuBLAS and every configuration, interleaved."""
    from megascale.flux.all_gather_gemm.hopper import launch

    n, k = SHAPES[shape]
    x = (torch.randn(m, k, device="cuda") / k**0.25).bfloat16()
    weight = (torch.randn(n, k, device="cuda") / k**0.25).bfloat16()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    arena: Any = SimpleNamespace(
        num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
        deadline_ns=0,
        done=torch.zeros(64, dtype=torch.int32, device="cuda"),
        report=torch.zeros(8, dtype=torch.int64, pin_memory=True),
    )
    wanted = F.linear(x, weight)

    def engine(config: Tiles) -> Any:
        return lambda: launch(x, x, weight, None, out, None, arena, config, "NK", m)

    methods: dict[str, Any] = {"cublas": lambda: torch.mm(x, weight.t(), out=out)}
    for config in CONFIGS:
        out.fill_(float("nan"))
        engine(config)()
        error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < 5e-3:
            raise SystemExit(f"{shape} m {m} {config.name}: error {error}; nothing is timed")
        methods[config.name] = engine(config)
    calls = max(2, round(4e12 / (m * n * k)))
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, call in methods.items():
            times[name].append(_time(call, calls))
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in medians if name != "cublas"), key=medians.__getitem__)
    ratio = medians["cublas"] / medians[best]
    tflops = 2 * m * n * k / medians["cublas"] / 1e9
    others = " ".join(f"{medians['cublas'] / medians[c.name]:.3f}" for c in CONFIGS)
    print(
        f"{shape:14} m {m:6} cublas {medians['cublas']:.4f} ms {tflops:4.0f} TF | {others} | {best}"
    )
    return {
        "bench": "flux-gemm",
        "case": {"shape": shape, "m": m, "tp": 2, "dtype": "bfloat16"},
        "metric": "cublas_ratio",
        "value": ratio,
        "target": {"op": ">=", "value": 0.98},
        "met": ratio >= 0.98 if m >= 2048 else None,
        "chosen": best,
        "forms": medians,
        "configs": {c.name: asdict(c) for c in CONFIGS},
        "device": torch.cuda.get_device_name(),
        "num_devices": 1,
        "dirty": False,
        "versions": installed_versions(("torch", "triton")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": f"python -m benchmarks.flux_gemm --shapes {shape} --rows {m}",
        "stats": {"rounds": rounds, "min": min(times[best]), "max": max(times[best])},
    }


def _time(call: Any, calls: int) -> float:
    """Milliseconds of one of `calls` back-to-back calls."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


if __name__ == "__main__":
    main()
