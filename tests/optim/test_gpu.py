"""On a GPU: the values of the CPU, the same bits on each run, and no wait for the device."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from megascale.config import OptimizerConfig
from megascale.optim import Flat, Optimizer, Reductions, Segment, build_optimizer
from tests.optim.shards import make_flats, random_like, set_grads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

SHAPES = {"a.weight": (700, 500), "a.bias": (701,), "b.weight": (33, 1100), "norm.weight": (5,)}
PARAMS = random_like({n: torch.empty(s) for n, s in SHAPES.items()}, seed=0)


def _build(name: Literal["adamw", "lamb"], device: str) -> tuple[list[Flat], Optimizer]:
    flats = make_flats({n: p.to(device) for n, p in PARAMS.items()})
    for flat in flats:
        flat.parameters = flat.master.bfloat16()
    return flats, build_optimizer(OptimizerConfig(name=name), flats, Reductions(tuple(PARAMS)))


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_values_masking_and_no_host_wait(name: Literal["adamw", "lamb"]) -> None:
    runs = [_build(name, device) for device in ("cpu", "cuda", "cuda")]
    for step in range(6):
        grads = random_like(PARAMS, seed=step + 1)
        if step == 3:
            grads["b.weight"][2, 2] = float("nan")
        results = []
        for flats, optimizer in runs:
            device = flats[0].master.device
            set_grads(flats, {n: g.to(device) for n, g in grads.items()})
            before = [f.master.clone() for f in flats]
            scale = torch.tensor(0.5, device=device)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                results.append(optimizer.step(1e-2, scale))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            kept = all(torch.equal(a, f.master) for a, f in zip(before, flats, strict=True))
            assert kept == (step == 3)
            assert results[-1].name_of_worst() == ("b.weight" if step == 3 else None)
        torch.testing.assert_close(
            results[1].norm.cpu(), results[0].norm, rtol=1e-12, atol=0, equal_nan=True
        )
    (cpu, _), (first, _), (second, _) = runs
    for a, b, c in zip(cpu, first, second, strict=True):
        torch.testing.assert_close(b.master.cpu(), a.master, rtol=1e-5, atol=1e-6)
        assert torch.equal(b.master, c.master)
        assert b.parameters is not None
        assert torch.equal(b.parameters, b.master.bfloat16())


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_kernels_equal_torch(name: Literal["adamw", "lamb"]) -> None:
    """In fp32 on the same device: both round each operation, not the same ones."""
    both = []
    for kernels in (True, False):
        flats = make_flats({n: p.cuda() for n, p in PARAMS.items()})
        cfg = OptimizerConfig(name=name)
        optimizer = build_optimizer(cfg, flats, Reductions(tuple(PARAMS)), kernels=kernels)
        for step in range(4):
            set_grads(flats, {n: g.cuda() for n, g in random_like(PARAMS, seed=step + 1).items()})
            optimizer.step(1e-2, 0.5)
        both.append(optimizer)
    for ours, torchs in zip(both[0].flats, both[1].flats, strict=True):
        torch.testing.assert_close(ours.master, torchs.master, rtol=2e-6, atol=1e-7)
    for squares in zip(both[0].exp_avg_sq, both[1].exp_avg_sq, strict=True):
        torch.testing.assert_close(*squares, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_offsets_beyond_32_bits(name: Literal["adamw", "lamb"]) -> None:
    """The last elements of a flat of more than 2**31 become what they become in a small one."""
    size, tail = 2**31 + 4096, 8192
    if torch.cuda.mem_get_info()[0] < 20 * size:
        pytest.skip(f"needs {20 * size / 2**30:.0f} GiB of free device memory")
    ends = []
    for length in (size, tail):
        master, grad = (torch.zeros(length, device="cuda") for _ in range(2))
        generator = torch.Generator(device="cuda").manual_seed(5)
        for values in (master, grad):
            values[-tail:] = torch.randn(tail, generator=generator, device="cuda")
        flat = Flat(master, grad, True, [Segment("w", master, grad, True)], master.bfloat16())
        optimizer = build_optimizer(OptimizerConfig(name=name), [flat], Reductions(("w",)))
        norm = optimizer.step(1e-2).norm
        assert flat.parameters is not None
        ends.append([norm, master[-tail:].clone(), flat.parameters[-tail:].clone()])
        del master, grad, flat, optimizer, values
        torch.cuda.empty_cache()
    for large, small in zip(*ends, strict=True):
        torch.testing.assert_close(large, small, rtol=1e-6, atol=0)
