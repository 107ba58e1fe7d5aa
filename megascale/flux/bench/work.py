"""The inputs of a case on one rank, its calls by form, and its values in fp32.

Random data, equal in distribution for every method; GEMM alone reads the gathered input itself.
Where weight and input fit into the L2 cache several sets of them take turns, as layers do.

Legend: T rows of all ranks (m), t rows of this rank, K reduction, N columns, all of one rank.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.flux import nccl, torch_symm
from megascale.flux.all_gather_gemm.config import FusedAllGather
from megascale.flux.bench.cases import Case
from megascale.flux.bench.world import World
from megascale.flux.forms import Form, forms
from megascale.flux.gemm_config import GemmConfig
from megascale.flux.ranks import gemm
from megascale.flux.tiles import shard_rows
from megascale.flux.timing import Run

VIEW = "_view"
_MOST_SETS = 8
_L2_FULL = 3  # times the cache: then what a set reads is gone when its turn comes again


class Inputs(NamedTuple):
    """One set. `x_TK` is what cuBLAS alone multiplies; `x` what the operator is given."""

    x: Tensor
    x_TK: Tensor
    weight: Tensor


class Work:
    """A case's inputs and calls."""

    def __init__(self, case: Case, world: World, dtype: torch.dtype) -> None:
        self.case = case
        self.problem = case.problem(dtype)
        self._world = world
        self._layout = case.local.layout
        generator = torch.Generator(world.device).manual_seed(1000 + world.rank)
        first = self._inputs(generator)
        rest = range(1, _num_sets(first, world))
        self.sets = [first, *(self._inputs(generator) for _ in rest)]

    def _inputs(self, generator: torch.Generator) -> Inputs:
        m, n, k = self.problem.m, self.problem.n, self.problem.k
        rows = m
        if self.case.op == "ag_gemm":
            first, end = shard_rows(m, self._world.size, self._world.rank)
            rows = end - first
        x = self._random((rows, k), 1.0, generator)
        shape = (n, k) if self._layout == "NK" else (k, n)
        weight = self._random(shape, k**-0.5, generator)
        x_TK = nccl.all_gather(x, self._world.arena, m) if self.case.op == "ag_gemm" else x
        return Inputs(x, x_TK, weight)

    def _random(self, shape: tuple[int, int], scale: float, generator: torch.Generator) -> Tensor:
        values = torch.empty(shape, dtype=self.problem.dtype, device=self._world.device)
        return values.normal_(0.0, scale, generator=generator)

    def call(self, name: str, config: Any, number: int) -> Any:
        """The form on inputs `number`. A name that ends in "_view" lets the result be a view."""
        options = {} if config is None else {"config": config}
        if name.endswith(VIEW) and name not in forms(self.case.op):
            name = name.removesuffix(VIEW).removesuffix("_two_hops")
            options["view"] = True
        form: Form = forms(self.case.op).get(name) or _BASELINES[name]
        x, _, weight = self.sets[number]
        if self.case.op == "ag_gemm":
            return form(
                x,
                [weight],
                [None],
                self._world.arena,
                layout=self._layout,
                num_rows=self.problem.m,
                gathered=False,
                **options,
            )
        return form(x, weight, None, self._world.arena, layout=self._layout, **options)

    def run(self, name: str, config: Any) -> Run:
        """Calls of the form on one set after the other, from the first."""
        numbers = cycle(range(len(self.sets)))
        return lambda: self.call(name, config, next(numbers))

    def gemm(self) -> Run:
        """cuBLAS alone on the full shape."""
        numbers = cycle(range(len(self.sets)))

        def run() -> Tensor:
            _, x_TK, weight = self.sets[next(numbers)]
            return gemm(x_TK, weight, layout=self._layout)

        return run

    def own_gemm(self, config: Any) -> Run | None:
        """The engine of the fused forms alone on the full shape; None where it cannot run."""
        if self._world.capability != (9, 0) or getattr(config, "engine", "") != "hopper":
            return None
        from megascale.flux.all_gather_gemm.hopper import launch

        tiles = engine_tiles(config)
        numbers = cycle(range(len(self.sets)))

        def run() -> Tensor:
            _, x_TK, weight = self.sets[next(numbers)]
            out_TN = x_TK.new_empty(self.problem.m, self.problem.n)
            arena: Any = self._world.arena
            launch(
                x_TK, x_TK, weight, None, out_TN, None, arena, tiles, self._layout, self.problem.m
            )
            return out_TN

        return run

    def reference(self, number: int) -> Tensor:
        """The operator's result on inputs `number`, in fp32 throughout."""
        _, x_TK, weight = self.sets[number]
        y_TN = gemm(x_TK.float(), weight.float(), layout=self._layout)
        if self.case.op == "ag_gemm":
            return y_TN
        reduce = nccl.reduce_scatter if self.case.op == "gemm_rs" else nccl.all_reduce
        return reduce(y_TN, self._world.arena)


_BASELINES: dict[str, Form] = {"two_shot_in_place": torch_symm.two_shot_in_place}


def engine_tiles(config: GemmConfig) -> FusedAllGather:
    """The tiles of a fused form of any operator, for the engine alone."""
    names = {field.name for field in fields(GemmConfig)}
    return FusedAllGather(**{n: value for n, value in asdict(config).items() if n in names})


def _num_sets(inputs: Inputs, world: World) -> int:
    """How many sets of such inputs fill the L2 cache several times over."""
    if not world.on_cuda:
        return 2
    cache = torch.cuda.get_device_properties(world.device).L2_cache_size
    num_bytes = sum(t.numel() * t.element_size() for t in (inputs.x, inputs.weight))
    return max(1, min(_MOST_SETS, -(-_L2_FULL * cache // num_bytes)))
