"""Cases, inputs and checks that the tests of the fused operators on GPUs share.

Everything takes any number of ranks. Inputs come from seeds that all ranks share, so each rank
computes by itself, in fp32, what must come out. A wrong value is returned as text and not raised:
ranks that go on alone would hide it behind a hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.arena import _counters as counters_of_forms
from megascale.flux.forms import forms
from megascale.flux.problem import Problem
from megascale.flux.tiles import shard_rows
from megascale.flux.values import mismatch

Op = Literal["ag_gemm", "gemm_rs", "gemm_ar"]
Layout = Literal["NK", "KN"]
OPS: tuple[Op, ...] = ("ag_gemm", "gemm_rs", "gemm_ar")
ROWS = (1, 3, 7, 8, 63, 64, 65, 127, 1000, 1024, 4097, 8192, 32768)


@dataclass(frozen=True)
class Case:
    """One call. `num_weights`: weights that share a gather (only ag_gemm has more than one)."""

    op: Op
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    layout: Layout = "NK"
    bias: bool = False
    num_weights: int = 1

    def problem(self, world_size: int) -> Problem:
        return Problem(self.op, self.m, self.n, self.k, world_size, self.dtype, self.layout)


def cases(op: Op) -> Iterator[Case]:
    """The table that every form goes through. Sizes that no tile divides among them."""
    for m in ROWS:
        yield Case(op, m, 776, 520)
        yield Case(op, m, 256, 1024, torch.float16, "KN", bias=True)
    yield Case(op, 2048, 2048, 2048, bias=True)
    yield Case(op, 96, 8, 8)  # less than a tile in every dimension
    if op == "ag_gemm":
        yield Case(op, 1000, 256, 512, bias=True, num_weights=3)


@dataclass
class Inputs:
    """What one rank gives to a call, and what it must get back."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    gathered: Tensor  # [T, K]: what ag_gemm gathers
    wanted: list[Tensor]  # fp32


def inputs(case: Case, rank: int, world_size: int, device: torch.device, seed: int) -> Inputs:
    """Fresh random numbers of a seed; those of a peer are the same on every rank."""
    generator = torch.Generator(device)

    def drawn(what: int, of_rank: int, *shape: int) -> Tensor:
        generator.manual_seed((seed * 8 + what) * 1024 + of_rank)
        numbers = torch.randn(shape, generator=generator, device=device)
        return (numbers / case.k**0.25).to(case.dtype)

    def weight_of(index: int, of_rank: int) -> Tensor:
        return drawn(index, of_rank, case.n, case.k)

    def bias_of(index: int, of_rank: int) -> Tensor | None:
        return drawn(4 + index, of_rank, case.n) if case.bias else None

    first, end = shard_rows(case.m, world_size, rank)
    if case.op == "ag_gemm":
        whole = drawn(3, 0, case.m, case.k)
        weights = [weight_of(i, rank) for i in range(case.num_weights)]
        biases = [bias_of(i, rank) for i in range(case.num_weights)]
        wanted = [_product(whole, w, b) for w, b in zip(weights, biases, strict=True)]
        x = whole[first:end].clone()
    else:
        parts = [drawn(3, r, case.m, case.k) for r in range(world_size)]
        total = torch.zeros(case.m, case.n, device=device)
        for r, part in enumerate(parts):
            total += _product(part, weight_of(0, r), None)
        weights, biases, x, whole = [weight_of(0, rank)], [bias_of(0, 0)], parts[rank], parts[rank]
        if (bias := biases[0]) is not None:
            total += bias.float()
        wanted = [total[first:end] if case.op == "gemm_rs" else total]
    if case.layout == "KN":
        weights = [w.t().contiguous() for w in weights]
    return Inputs(x, weights, biases, whole, wanted)


def _product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    y_TN = x_TK.float() @ weight_NK.float().t()
    return y_TN if bias_N is None else y_TN + bias_N.float()


def run_form(
    name: str, case: Case, given: Inputs, arena: Any, config: Any = None, *, gathered: bool = False
) -> tuple[list[Tensor], Tensor | None]:
    """([outputs], gathered input where asked for) of one call of a form."""
    form: Callable[..., Any] = forms(case.op)[name]
    options = {} if config is None else {"config": config}
    if case.op == "ag_gemm":
        options |= {"num_rows": case.m, "gathered": gathered}
        found: tuple[list[Tensor], Tensor | None] = form(
            given.x, given.weights, given.biases, arena, layout=case.layout, **options
        )
        return found
    (weight,), (bias,) = given.weights, given.biases
    return [form(given.x, weight, bias, arena, layout=case.layout, **options)], None


def wrong(case: Case, found: list[Tensor], given: Inputs) -> str:
    """What is wrong with the outputs, "" if nothing is."""
    return mismatch(found, given.wanted, case.dtype)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Memory that `torch.empty` gives is filled with NaN: an element that nobody writes shows."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS asks for in this mode
    torch.use_deterministic_algorithms(True)  # which also fills what `torch.empty` gives
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def settle(group: dist.ProcessGroup | None = None) -> None:
    """Every rank's device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier(group)


def poison_slots(arena: Any) -> None:
    """NaN bytes into this rank's part of every slot, between calls."""
    settle(arena.group)
    for slot in arena._slots:
        slot.data[arena.rank].fill_(255)
    settle(arena.group)


def not_at_rest(arena: Any) -> str:
    """What a finished call has left behind: flags, counters, a report. "" if nothing."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    flags = [slot.flags[arena.rank].nonzero().flatten()[:5].tolist() for slot in arena._slots]
    counters = {
        what: words.nonzero().flatten()[:5].tolist()
        for what, words in {"done": arena.done, **counters_of_forms.get(arena, {})}.items()
    }
    if any(flags) or any(counters.values()) or int(arena.report[0]):
        return f"flags {flags}, counters {counters}, report {arena.report.tolist()} left"
    return ""
