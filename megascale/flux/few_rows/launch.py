"""What launches of the form "few_rows" share: tickets, tiles, how many programs run at once.

Legend: W ranks, m rows of all, N columns, K reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.few_rows.config import FewRows, block_m_of, candidates, programs_an_sm
from megascale.flux.gemm_config import capability_of
from megascale.flux.problem import Layout, Op, Problem
from megascale.flux.tiles import ceil_div

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

_MAX_TILES = 8192  # with splits: one ticket each
_tickets: WeakKeyDictionary[Arena, Tensor] = WeakKeyDictionary()


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


@cache
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
    """The first of `candidates`, kept."""
    key = (op, m, n, k, arena.world_size, arena.device)
    if key not in _defaults:
        problem = Problem(op, m, n, k, arena.world_size, dtype, "NK")
        _defaults[key] = candidates(problem, capability_of(arena.device))[0]
    return _defaults[key]


_defaults: dict[tuple[Op, int, int, int, int, torch.device], FewRows] = {}


def tickets_of(arena: Arena) -> Tensor:
    """int32 words of this rank, zero between calls: splits of a tile that have come and gone.

    Raises FluxError at a first call inside a capture, where they would belong to the graph.
    """
    found = _tickets.get(arena)
    if found is None:
        if arena.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise FluxError("the first call of this form is inside a capture; call it once before")
        found = torch.zeros(_MAX_TILES, dtype=torch.int32, device=arena.device)
        _tickets[arena] = found
    return found


def launch(
    kernel: Any,
    plan: Plan,
    arena: Arena,
    m: int,
    least_programs: int,
    arguments: dict[str, Any],
    constants: dict[str, Any],
) -> None:
    """Launch with as many programs as there are works, at most as many as run at once.

    least_programs  what the rest of the protocol needs, at most the number of SMs
    In the interpreter: phase after phase, since programs run one after another there.
    """
    from megascale.flux import kernel_call

    constants |= plan.constants
    phases = [name for name in ("PUSH", "MULTIPLY", "COLLECT") if name in kernel.arg_names]
    if _interpreted():
        room = arena.num_sms * programs_an_sm(plan.config, m, (8, 0))
        programs = max(min(plan.works, room), least_programs)
        for now in phases:
            one = {phase: phase == now for phase in phases}
            kernel_call.launch(kernel, programs, arguments, {**constants, **one})
        return
    constants |= dict.fromkeys(phases, True)
    key = (kernel, plan, m, arena.device, *constants.values())
    at_once = _programs.get(key)
    if at_once is None:
        at_once = _programs[key] = _at_once(kernel, plan, arena, m, arguments, constants)
    programs = max(min(plan.works, arena.num_sms * at_once), least_programs)
    kernel_call.launch(kernel, programs, arguments, constants)


def _at_once(
    kernel: Any,
    plan: Plan,
    arena: Arena,
    m: int,
    arguments: dict[str, Any],
    constants: dict[str, Any],
) -> int:
    """Programs that an SM holds: by the arithmetic and by the shared memory of what was compiled (1
    KB of each block is the driver's).

    Registers need no question: 255 a thread are the most, and `programs_an_sm` counts on that.
    """
    compiled = kernel.warmup(grid=(1,), **arguments, **constants)
    there = torch.cuda.get_device_properties(arena.device).shared_memory_per_multiprocessor
    capability = capability_of(arena.device)
    found = min(
        programs_an_sm(plan.config, m, capability), there // (compiled.metadata.shared + 1024)
    )
    if found < 1:
        raise FluxError(
            f"{plan.config} with {m} rows does not fit on an SM of capability {capability}; give a "
            "smaller block_n, block_k or num_stages"
        )
    return int(found)


_programs: dict[tuple[Any, ...], int] = {}  # that run on an SM at once, by kernel and constants


@cache
def _interpreted() -> bool:
    from megascale.flux.signals import INTERPRETED

    return bool(INTERPRETED.value)
