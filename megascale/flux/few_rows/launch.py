"""What launches of the form "few_rows" share: tickets, tiles, how many programs run at once.

Legend: W ranks, m rows of all, N columns, K reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import zeros_of
from megascale.flux.few_rows.config import FewRows, block_m_of, candidates, programs_an_sm
from megascale.flux.gemm_config import capability_of
from megascale.flux.problem import Layout, Op, Problem
from megascale.flux.symmetric.prepared import Prepared
from megascale.flux.tiles import ceil_div
from megascale.kernels.remembered import RememberedOf

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

_MAX_TILES = 8192  # with splits: one ticket each


@dataclass(frozen=True)
class Plan:
    """Tiles of a call, as the kernels count them (`kernel.py`)."""

    config: FewRows
    block_m: int
    tiles_m: int
    tiles_n: int
    even_k: bool
    even_n: bool
    nk: bool

    @property
    def works(self) -> int:
        """Pairs of tile and split."""
        return self.tiles_m * self.tiles_n * self.config.splits

    @property
    def partial_bytes(self) -> int:
        """fp32 tiles of all splits; none without a split."""
        if self.config.splits == 1:
            return 0
        return self.works * self.block_m * self.config.block_n * 4

    @property
    def constants(self) -> dict[str, Any]:
        """Launch arguments that both kernels take."""
        return {
            "NK": self.nk,
            "SPLITS": self.config.splits,
            "EVEN_K": self.even_k,
            "EVEN_N": self.even_n,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.config.block_n,
            "BLOCK_K": self.config.block_k,
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
        }


def plan_of(config: FewRows, m: int, n: int, k: int, layout: Layout) -> Plan:
    """The tiles of [m, k] times a weight of n columns."""
    block_m = block_m_of(m)
    plan = Plan(
        config,
        block_m,
        ceil_div(m, block_m),
        ceil_div(n, config.block_n),
        k % config.block_k == 0,
        n % config.block_n == 0,
        layout == "NK",
    )
    if config.splits > 1 and plan.tiles_m * plan.tiles_n > _MAX_TILES:
        raise FluxError(
            f"{m} rows and {n} columns are {plan.tiles_m * plan.tiles_n} tiles, and at most "
            f"{_MAX_TILES} can be split along k; use splits=1 or another form"
        )
    return plan


def default_config(op: Op, m: int, n: int, k: int, arena: Arena, dtype: torch.dtype) -> FewRows:
    """The first of `candidates`."""
    problem = Problem(op, m, n, k, arena.world_size, dtype, "NK")
    return candidates(problem, capability_of(arena.device))[0]


def tickets_of(arena: Arena) -> Tensor:
    """One a tile: its splits that have come and gone."""
    return zeros_of(arena, "tickets", _MAX_TILES)


class Launch:
    """The launch of a kernel of this form for one problem: the part of a call that is always equal.

    integers, constants  of the kernel, without those of the plan
    least_programs       what the rest of the protocol needs, at most the number of SMs
    """

    def __init__(
        self,
        kernel: Any,
        plan: Plan,
        arena: Arena,
        m: int,
        least_programs: int,
        integers: dict[str, int],
        constants: dict[str, Any],
    ) -> None:
        self._kernel, self._plan, self._m = kernel, plan, m
        self._device, self._num_sms = arena.device, arena.num_sms
        self._least_programs = least_programs
        self._integers = integers
        self._constants = {**constants, **plan.constants}
        self._phases: list[Prepared] = []

    def load(self, *tensors: Tensor | None) -> None:
        """The kernel is compiled for such tensors and loaded; once."""
        if not self._phases:
            self._phases = self._prepare(tensors)
            for phase in self._phases:
                phase.load(*tensors)

    def __call__(self, *tensors: Tensor | None) -> None:
        """With the kernel's tensors in its order."""
        self.load(*tensors)
        for phase in self._phases:
            phase.launch(*tensors)

    def _prepare(self, tensors: tuple[Tensor | None, ...]) -> list[Prepared]:
        """One launch with as many programs as there are works, at most as many as run at once.

        In the interpreter, phase after phase: programs run one after another there.
        """
        names = self._kernel.arg_names
        phases = [name for name in ("PUSH", "MULTIPLY", "COLLECT") if name in names]
        if _interpreted():
            at_once = programs_an_sm(self._plan.config, self._m, (8, 0))
            launches = [{phase: phase == now for phase in phases} for now in phases]
        else:
            launches = [dict.fromkeys(phases, True)]
            arguments = {**dict(zip(names, tensors, strict=False)), **self._integers}
            at_once = self._at_once(arguments, {**self._constants, **launches[0]})
        programs = max(min(self._plan.works, self._num_sms * at_once), self._least_programs)
        return [
            Prepared(self._kernel, programs, self._integers, {**self._constants, **phase})
            for phase in launches
        ]

    def _at_once(self, arguments: dict[str, Any], constants: dict[str, Any]) -> int:
        """Programs that an SM holds: by the arithmetic and by the shared memory of what was
        compiled (1 KB of each block is the driver's).

        Registers need no question: 255 a thread are the most, and `programs_an_sm` counts on that.
        """
        compiled = self._kernel.warmup(grid=(1,), **arguments, **constants)
        there = torch.cuda.get_device_properties(self._device).shared_memory_per_multiprocessor
        capability = capability_of(self._device)
        found = min(
            programs_an_sm(self._plan.config, self._m, capability),
            there // (compiled.metadata.shared + 1024),
        )
        if found < 1:
            raise FluxError(
                f"{self._plan.config} with {self._m} rows does not fit on an SM of capability "
                f"{capability}; give a smaller block_n, block_k or num_stages"
            )
        return int(found)


@dataclass(frozen=True)
class Call:
    """What calls of one problem share.

    num_rows   of the result on this rank
    num_bytes  of the turn
    """

    launch: Launch
    num_rows: int
    num_bytes: int
    tickets: Tensor


def call_of(arena: Arena, key: tuple[Any, ...], make: Callable[[], Call]) -> Call:
    """The call of this arena under `key`, prepared once; the key says all that it depends on."""
    return _calls.get(arena, (*key, arena.deadline_ns, arena.num_sms), make)


_calls = RememberedOf(4096)


@cache
def _interpreted() -> bool:
    from megascale.flux.signals import INTERPRETED

    return bool(INTERPRETED.value)
