"""Every form of ours on one GPU, with virtual ranks: values, repeatability, flags at rest.

NCCL and torch's own operators need real ranks (`test_gpu_ops.py`). Here the kernels of two or four
ranks share a device, so that everything but NVLink is exercised where there is one GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.flux.forms import missing
from tests.flux.virtual_ranks import VirtualArena, flags_at_rest, on_all, virtual_arenas, warm_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OURS = ("plain", "chunked", "fused", "few_rows")
SHAPES = [  # m, n, k
    (1, 256, 512),
    (3, 776, 520),
    (16, 512, 1024),
    (127, 264, 512),
    (512, 768, 512),
    (1000, 776, 520),
    (2048, 1024, 512),
]
LIMIT = 6e-3  # of bf16, relative


def _data(*shape: int) -> Tensor:
    return (torch.randn(shape, device="cuda") / shape[-1] ** 0.25).bfloat16()


def _rows(m: int, world: int, rank: int) -> slice:
    each = -(-m // world)
    return slice(min(rank * each, m), min((rank + 1) * each, m))


def _cases(op: str) -> list[Any]:
    return [
        pytest.param(op, name, world, id=f"{op}-{name}-{world}")
        for name in OURS
        if name not in missing(op)
        for world in (2, 4)
    ]


@pytest.mark.parametrize(
    ("op", "name", "world"), [*_cases("ag_gemm"), *_cases("gemm_rs"), *_cases("gemm_ar")]
)
def test_values(op: str, name: str, world: int) -> None:
    from megascale.flux.forms import configs, forms
    from megascale.flux.problem import Problem

    failures = []
    for m, n, k in SHAPES:
        for layout in ("NK", "KN"):
            problem = Problem(op, m, n, k, world, torch.bfloat16, layout)  # type: ignore[arg-type]
            found = configs(op, name, problem, torch.cuda.get_device_capability()) or [None]
            for config in _one_of_a_kind(found):
                options = {} if config is None else {"config": config}
                try:
                    error = _check(op, name, forms(op)[name], world, (m, n, k), layout, options)
                except (RuntimeError, AssertionError, ValueError, TypeError) as caught:
                    if "CUDA" in str(caught) or "cuda" in str(caught):
                        raise
                    error = repr(caught)
                if error:
                    failures.append(f"{m}x{n}x{k} {layout} {config}: {error}")
    assert not failures, "\n".join(failures)


def _one_of_a_kind(found: list[Any]) -> list[Any]:
    """The first configuration of each engine and transport: others differ in tiles, and each is a
    compilation. Of a form without tiles all configurations.
    """
    kinds = {}
    for index, config in enumerate(found[::-1]):
        tiles = hasattr(config, "block_n")
        options = (getattr(config, "engine", None), getattr(config, "in_band", None))
        kinds[options if tiles else index] = config
    return list(kinds.values())


def _check(
    op: str,
    name: str,
    form: Any,
    world: int,
    shape: tuple[int, int, int],
    layout: str,
    options: Any,
) -> str:
    """Empty, or what was wrong."""
    m, n, k = shape
    arenas = virtual_arenas(world, world * m * max(n, k) * 2 + (64 << 10) + world * m * n * 4)
    weights = [_data(n, k) for _ in range(world)]
    placed = [w if layout == "NK" else w.t().contiguous() for w in weights]
    bias = _data(n)
    x = [_data(m, k) for _ in range(1 if op == "ag_gemm" else world)]

    def call(rank: int, arena: VirtualArena) -> Tensor:
        if op == "ag_gemm":
            outputs, _ = form(
                x[0][_rows(m, world, rank)],
                [placed[rank]],
                [bias],
                arena,
                layout=layout,
                num_rows=m,
                gathered=False,
                **options,
            )
            return outputs[0]
        return form(x[rank], placed[rank], bias, arena, layout=layout, **options)

    if op == "ag_gemm":
        wanted = [x[0].float() @ w.float().t() + bias.float() for w in weights]
    else:
        total = sum(a.float() @ w.float().t() for a, w in zip(x, weights, strict=True))
        total = total + bias.float()
        wanted = [total[_rows(m, world, r)] if op == "gemm_rs" else total for r in range(world)]
    first: list[Tensor] = []
    warm_up(arenas, call)
    for turn in range(4):
        found = on_all(arenas, call)
        for rank, (y, right) in enumerate(zip(found, wanted, strict=True)):
            if y.shape != right.shape:
                return f"rank {rank} has {tuple(y.shape)} instead of {tuple(right.shape)}"
            error = float((y.float() - right).norm() / right.norm()) if right.numel() else 0.0
            if not error < LIMIT:
                return f"call {turn} of rank {rank}: error {error}"
        first = first or found
        if not all(torch.equal(a, b) for a, b in zip(first, found, strict=True)):
            return f"call {turn} differs from the first"
        if not flags_at_rest(arenas):
            return f"call {turn} leaves flags set"
    return ""
