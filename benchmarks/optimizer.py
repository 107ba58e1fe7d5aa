"""The optimizer's step on one GPU against torch's operations and the memory's roof.

    python -m benchmarks.optimizer [--elements N] [--output FILE] [--commit HASH]

Methods, interleaved, on flats as four layers of one rank give them (bf16 parameters):
    kernels  one Triton kernel a pass (`optim/kernel.py`)
    torch    `_foreach_norm`, scaling, fused AdamW (LAMB: as many passes as it takes), rounding
    zero     zeroing of the gradients, which the kernels' training step does without
The roof is the bytes that a step has to move over the rate of a device copy in the same run. Both
methods' masters are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from benchmarks.arguments import writable_file
from megascale.config import OptimizerConfig
from megascale.env import installed_versions
from megascale.optim import Flat, Optimizer, Reductions, Segment, build_optimizer

NUM_LAYERS = 4
BYTES = {"adamw": 34, "lamb": 46}  # an element: squares 4; update 30, or 28 and 14
SHARES = (2 / 12, 1 / 12, 1 / 12, 8 / 12)  # of a layer, of the segments of its matrices
VECTOR = 65536  # elements of a layer that do not decay
OptimizerName = Literal["adamw", "lamb"]


def main() -> None:
    """Print the times; append a row for each optimizer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    rows = [_measure(name, int(arguments.elements), arguments.rounds) for name in ("adamw", "lamb")]
    if arguments.output:
        with arguments.output.open("a") as file:
            for row in rows:
                file.write(json.dumps(row | {"commit": arguments.commit}) + "\n")


def _flats(num_elements: int) -> list[Flat]:
    flats = []
    generator = torch.Generator(device="cuda").manual_seed(1)
    for layer in range(NUM_LAYERS):
        matrices = [int(num_elements / NUM_LAYERS * share) // 64 * 64 for share in SHARES]
        for decay, sizes in ((True, matrices), (False, [VECTOR])):
            master, grad = (
                torch.randn(sum(sizes), generator=generator, device="cuda") for _ in range(2)
            )
            segments, start = [], 0
            for i, size in enumerate(sizes):
                piece = slice(start, start + size)
                name = f"layers.{layer}.{decay}.{i}"
                segments.append(Segment(name, master[piece], grad[piece], decay))
                start += size
            flats.append(Flat(master, grad, decay, segments, master.bfloat16()))
    return flats


def _measure(name: OptimizerName, num_elements: int, rounds: int) -> dict[str, Any]:
    flats = _flats(num_elements)
    names = tuple(segment.name for flat in flats for segment in flat.segments)
    cfg = OptimizerConfig(name=name, lr=1e-3)
    methods = {
        label: build_optimizer(cfg, flats, Reductions(names), kernels=kernels)
        for label, kernels in (("kernels", True), ("torch", False))
    }
    error = _difference(methods, flats)
    if not error < 2e-6:
        raise SystemExit(f"{name}: masters differ by {error}; nothing is timed")
    calls: dict[str, Callable[[], object]] = {
        label: lambda optimizer=optimizer: optimizer.step(1e-6, 1.0)  # type: ignore[misc]
        for label, optimizer in methods.items()
    }
    calls["norm"] = methods["kernels"].updates.gradient_squares
    calls["torch_norm"] = methods["torch"].updates.gradient_squares
    calls["zero"] = lambda: [flat.grad.zero_() for flat in flats]
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    calls["copy"] = lambda: target.copy_(source)
    times: dict[str, list[float]] = {label: [] for label in calls}
    for number in range(rounds + 2):
        for label, call in calls.items():
            if label == "zero":  # the steps before and after work on random gradients
                kept = [flat.grad.clone() for flat in flats]
            elapsed = _time(call)
            if label == "zero":
                for flat, grad in zip(flats, kept, strict=True):
                    flat.grad.copy_(grad)
                del kept
            if number >= 2:
                times[label].append(elapsed)
    medians = {label: statistics.median(values) for label, values in times.items()}
    rate = 8 * source.numel() / medians["copy"] / 1e6  # GB/s
    count = sum(flat.master.numel() for flat in flats)
    roof = BYTES[name] * count / rate / 1e6
    per_1e9 = {label: value * 1e9 / count for label, value in medians.items() if label != "copy"}
    print(
        f"{name}: {count / 1e9:.3f}e9 elements, copy {rate:.0f} GB/s, differ by {error:.1e}\n"
        f"  ms for 1e9 elements: kernels {per_1e9['kernels']:.2f} "
        f"(norm {per_1e9['norm']:.2f}), roof {roof * 1e9 / count:.2f} = "
        f"{roof / medians['kernels']:.1%}; torch {per_1e9['torch']:.2f} "
        f"(norm {per_1e9['torch_norm']:.2f}) and zeroing {per_1e9['zero']:.2f}"
    )
    return {
        "bench": "optimizer",
        "case": {"name": name, "elements": count},
        "metric": "ms_per_1e9",
        "value": per_1e9["kernels"],
        "baselines": {"torch": per_1e9["torch"], "roof": roof * 1e9 / count},
        "parts": per_1e9,
        "copy_gb_s": rate,
        "device": torch.cuda.get_device_name(),
        "num_devices": 1,
        "dirty": False,
        "versions": installed_versions(("torch", "triton")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": f"python -m benchmarks.optimizer --elements {num_elements}",
        "stats": {"rounds": rounds, "min": min(times["kernels"]), "max": max(times["kernels"])},
    }


def _difference(methods: dict[str, Optimizer], flats: list[Flat]) -> float:
    """Largest difference of masters after a step of each method from the same state."""
    before = [(flat.master.clone(), flat.grad.clone()) for flat in flats]
    after = []
    for optimizer in methods.values():
        for flat, (master, grad) in zip(flats, before, strict=True):
            flat.master.copy_(master)
            flat.grad.copy_(grad)
        optimizer.step(1e-3, 1.0)
        after.append([flat.master.clone() for flat in flats])
    for flat, (_, grad) in zip(flats, before, strict=True):
        flat.grad.copy_(grad)
    moved = max(float((a - b).abs().max()) for a, (b, _) in zip(after[0], before, strict=True))
    assert moved > 1e-4, f"a step of 1e-3 moved nothing: {moved}"
    return max(float((a - b).abs().max()) for a, b in zip(*after, strict=True))


def _time(call: Callable[[], object]) -> float:
    """Milliseconds of a call on the device, launched ahead of it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)  # a millisecond: the launches are behind it before it ends
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


if __name__ == "__main__":
    main()
