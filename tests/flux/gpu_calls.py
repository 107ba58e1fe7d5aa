"""Calls of the public operators in long sequences, checked on the device without waiting for it.

Without bias the operators are linear and powers of two are exact, so one set of inputs gives a
different result in every call: x times 0.5, 1, 2 or 4. What is left of an earlier call is wrong.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux import AllGatherGemm, GemmAllReduce, GemmReduceScatter
from megascale.flux.forms import missing
from tests.flux.gpu_cases import OPS, Case, Inputs, Op, inputs, settle, wrong

SCALES = (0.5, 1.0, 2.0, 4.0)
MILLISECOND = 2_000_000  # cycles, about
_CLASSES: dict[Op, Any] = {
    "ag_gemm": AllGatherGemm,
    "gemm_rs": GemmReduceScatter,
    "gemm_ar": GemmAllReduce,
}
_FAMILY = {"fused": {"fused", "few_rows"}, "chunked": {"chunked"}}


class Verdict:
    """Counts wrong results on the device, on the stream that made them."""

    def __init__(self) -> None:
        self._wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self._checked = 0

    def check(self, found: Tensor, wanted: Tensor, scale: float) -> None:
        self._checked += 1
        assert found.shape == wanted.shape, (found.shape, wanted.shape)
        if found.numel():
            limit = 0.02 * scale * wanted.abs().max()
            off = (found.float() - scale * wanted).abs().max()
            self._wrong += ~(off <= limit)  # NaN is wrong

    def failures(self, what: str) -> list[str]:
        """Synchronises."""
        count = int(self._wrong)
        return [f"{what}: {count} of {self._checked} results are wrong"] if count else []


@dataclass
class Calls:
    """The operators of one group and mode, and inputs for them."""

    group: dist.ProcessGroup
    mode: str
    options: dict[str, Any]

    def __post_init__(self) -> None:
        absent = {op for op in OPS if _FAMILY.get(self.mode, {"nccl"}) <= set(missing(op))}
        self.ops = [op for op in OPS if op not in absent]
        self.operators = {
            op: _CLASSES[op](self.group, mode=self.mode, **self.options) for op in OPS
        }
        self.rank, self.world_size = dist.get_rank(self.group), self.group.size()
        self.table: list[tuple[Case, Inputs]] = []

    def prepare(self, rows: list[int]) -> list[str]:
        """A case of every operator for each number of rows; each is called once and compared."""
        failures = []
        device = torch.device("cuda", torch.cuda.current_device())
        for seed, m in enumerate(sorted(rows, reverse=True)):  # memory grows at the first
            for op in self.ops:
                case = Case(op, m, 1032, 264)  # several tiles a program at the largest m
                given = inputs(case, self.rank, self.world_size, device, 2000 + seed)
                problem = wrong(case, [self.call(case.op, given, case, 1.0)], given)
                failures += [f"{self.mode}, {case}: {problem}"] if problem else []
                self.table.append((case, given))
        return failures

    def call(self, op: Op, given: Inputs, case: Case, scale: float) -> Tensor:
        x, (weight,) = given.x * scale, given.weights
        if op == "ag_gemm":
            found: Tensor = self.operators[op](x, weight, num_rows=case.m)
        else:
            found = self.operators[op](x, weight)
        return found

    def call_any(self, shared: random.Random, verdict: Verdict) -> None:
        """One call; `shared` draws the same on every rank."""
        case, given = shared.choice(self.table)
        scale = shared.choice(SCALES)
        verdict.check(self.call(case.op, given, case, scale), given.wanted[0], scale)


class Delays:
    """Now and then this rank's stream or host is late, differently on every rank."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(1000 + rank)

    def maybe(self) -> None:
        draw = self._random.random()
        if draw < 0.1:
            torch.cuda._sleep(int(self._random.random() * MILLISECOND))
        elif draw > 0.97:
            time.sleep(self._random.random() * 2e-3)


@dataclass
class Memory:
    """Device memory in use between two points of a program that should need no more."""

    allocated: int
    reserved: int
    free: int

    @classmethod
    def now(cls) -> Memory:
        settle()
        free, _ = torch.cuda.mem_get_info()
        return cls(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), free)

    def growth(self, later: Memory) -> str:
        """What grew, "" if nothing. Of what the allocator holds a little may be new rounding."""
        slack = 32 << 20
        if (
            later.allocated > self.allocated + (1 << 20)
            or later.reserved > self.reserved + slack
            or later.free < self.free - slack
        ):
            return f"memory grew: {self} to {later}"
        return ""
