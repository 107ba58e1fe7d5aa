"""Which form makes a call: by mode, machine, problem, and what was measured.

The answer for a shape class is found once and kept; after that a call costs its checks and one
dictionary look-up.

Invariant: all ranks take the same form, from what is equal on all of them: the machine facts of the
group (`machine.py`), types and shapes, the tuner's choices. What may differ, the address and the
strides of x, decides nothing: an x that kernels cannot read as it lies is copied. A weight is not,
that would be a pass over memory in every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import Arena
from megascale.flux.default_rule import Mode, default_form
from megascale.flux.forms import Form, configs, forms, missing
from megascale.flux.gemm_config import capability_of
from megascale.flux.machine import why_not_fused
from megascale.flux.mode import FluxMode
from megascale.flux.problem import Op, Problem, check
from megascale.flux.ranks import GroupOnly
from megascale.flux.settings import Settings
from megascale.flux.timing import EagerTimer, HostTimer
from megascale.flux.tuner import REFERENCE, Candidate, Tuner
from megascale.flux.tuning_cache import Key, TuningCache

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("tuned.json")

_FUSED = ("few_rows", "fused")
_WITHOUT_SPINNING = ("nccl", "chunked")  # nothing that fills the GPU waits in them


@dataclass
class Call:
    """The arguments of one call, as `problem.check` describes them."""

    op: Op
    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    layout: str
    num_rows: int | None = None
    gathered: bool = False


@dataclass(frozen=True)
class Bound:
    """A form for a shape class, and whom it runs among."""

    name: str
    form: Callable[..., Any]
    ranks: Any  # an Arena; GroupOnly for the reference
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, call: Call) -> Any:
        """What the form of the call's operator gives."""
        if call.op == "ag_gemm":
            return self.form(
                call.x,
                call.weights,
                call.biases,
                self.ranks,
                layout=call.layout,
                num_rows=call.num_rows,
                gathered=call.gathered,
                **self.options,
            )
        (weight,), (bias,) = call.weights, call.biases
        return self.form(call.x, weight, bias, self.ranks, layout=call.layout, **self.options)


class Selection:
    """The choices of one operator object; what is measured is shared by those of a group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        settings: Settings,
    ) -> None:
        self.group = group
        self.mode = settings.mode
        self._settings = settings
        self._names = _names_of(settings.mode, settings.spin)
        self._deadline_ns = int(1e9 * (settings.deadline_s or 0))
        self._devices = _devices_of(group)
        self._obstacles: dict[torch.device, str | None] = {}
        self._bound: dict[tuple[Problem, int, torch.device, bool], Bound] = {}

    def bind(self, call: Call) -> tuple[Problem, Bound]:
        """The problem and the form for it; `call.x` becomes what that form can read.

        Raises FluxError for arguments that are wrong, or that the mode cannot run. Collective at
        the first call on a device, and with tune="now" at the first of a shape class.
        """
        problem = self._for_kernels(call)
        if problem is None:
            return self._check(call), self._reference(call.op, call.x.device)
        capturing = call.x.is_cuda and torch.cuda.is_current_stream_capturing()
        axis = 0 if problem.layout == "NK" else 1
        num_columns = sum(weight.shape[axis] for weight in call.weights)
        known = (problem, num_columns, call.x.device, capturing)
        if known not in self._bound:
            whole = replace(problem, n=num_columns)
            self._bound[known] = self._choose(whole, call, "graph" if capturing else "eager")
        bound = self._bound[known]
        self.arena(call.x.device)  # several operators share it, each with its settings
        return problem, bound

    def _for_kernels(self, call: Call) -> Problem | None:
        """The problem where kernels run it, None where the reference does; FluxError where the mode
        allows neither."""
        if self.mode == "reference":
            return None
        device = getattr(call.x, "device", None)
        if device not in self._obstacles:
            self._check(call)  # what is wrong here is said before peers are asked anything
        obstacle = self._obstacle(call.x.device)
        if obstacle is None:
            call.x = _readable(call.x)
            try:
                return self._check(call, fused=True)
            except FluxError as error:
                if self.mode != "auto":
                    raise
                obstacle = str(error)
        self._check(call)  # what no form takes is an error, and no reason for the reference
        if self.mode != "auto":
            raise FluxError(
                f'mode is "{self.mode}", and {obstacle}; use mode "auto", which takes the '
                'reference where it must, or "reference"'
            )
        _say_once(self.group, call.x, obstacle)
        return None

    def arena(self, device: torch.device) -> Arena:
        """The group's symmetric memory with this operator's settings; made at first use."""
        arena = Arena.of(self.group, device)
        if arena.device != device:
            raise FluxError(
                f"x is on {device} and the group's symmetric memory on {arena.device}; a rank of a "
                "group uses one device"
            )
        arena.reserved_sms, arena.deadline_ns = self._settings.reserve_sms, self._deadline_ns
        if arena.num_sms < 1:
            raise FluxError(
                f"reserve_sms is {self._settings.reserve_sms}, and the device has "
                f"{arena.num_sms + self._settings.reserve_sms} SMs; leave some to the GEMM"
            )
        return arena

    def collective(self, name: str, x_D: Tensor) -> tuple[Form, Any]:
        """The form of a collective without a GEMM ("all_gather", ...), and whom it runs among.

        Ours where kernels may move such rows, else the backend's. `x_D` is the input or the product
        of an operator.
        """
        if self.mode != "reference" and self._obstacle(x_D.device) is None:
            described = x_D.shape[1] * x_D.element_size() % 16 == 0
            if described and x_D.dtype in (torch.bfloat16, torch.float16):
                return forms(name)["plain"], self.arena(x_D.device)
        return forms(name)[REFERENCE], GroupOnly(self.group, x_D.device)

    def _check(self, call: Call, *, fused: bool = False) -> Problem:
        problem = check(
            call.op,
            call.x,
            call.weights,
            call.biases,
            self.group,
            call.layout,
            call.num_rows,
            fused=fused,
        )
        if call.x.device.type not in self._devices:
            raise FluxError(
                f"x is on {call.x.device}, and the backend of the group moves tensors of "
                f"{' and '.join(sorted(self._devices))} only"
            )
        return problem

    def _obstacle(self, device: torch.device) -> str | None:
        """Why kernels cannot run on this device; asks the peers at first."""
        if device not in self._obstacles:
            self._obstacles[device] = why_not_fused(self.group, device)
        return self._obstacles[device]

    def _reference(self, op: Op, device: torch.device) -> Bound:
        return Bound(REFERENCE, forms(op)[REFERENCE], GroupOnly(self.group, device))

    def _choose(self, problem: Problem, call: Call, when: Mode) -> Bound:
        """The form for a shape class: the mode's own, or the tuner's."""
        arena = self.arena(call.x.device)
        cache, tuner = _tuner_of(self.group, self._settings.cache, call.x.device)
        key = Key.of(problem, when, device=call.x.device)
        names = self._names or tuple(forms(call.op))
        offered = {
            candidate.label: (candidate, bound)
            for name in names
            if name not in missing(call.op)
            for candidate, bound in _candidates(name, problem, call, arena)
        }
        candidates = [candidate for candidate, _ in offered.values()]
        if not candidates:
            raise FluxError(
                f'mode is "{self.mode}", and {call.op} has none of its forms '
                f'({", ".join(names)}) in this installation; use mode "auto"'
            )
        if self._names is None:
            chosen = tuner.choose(key, candidates, self._settings.tune)
        else:
            chosen = _of_some(key, candidates, cache)
        return offered[chosen.label][1]


def _candidates(
    name: str, problem: Problem, call: Call, arena: Arena
) -> Iterator[tuple[Candidate, Bound]]:
    """The form in each of its configurations, bound to the arguments of this call."""
    for config in configs(call.op, name, problem, capability_of(arena.device)) or [None]:
        options = {} if config is None else {"config": config}
        bound = Bound(name, forms(call.op)[name], arena, options)
        yield Candidate(name, config, partial(bound.run, call)), bound


def _names_of(mode: FluxMode, spin: bool) -> tuple[str, ...] | None:
    """The forms that may be taken, the default last; None: all, by the tuner."""
    if mode == "auto":
        return None if spin else _WITHOUT_SPINNING
    return {"fused": _FUSED, "chunked": ("chunked",), "reference": (REFERENCE,)}[mode]


def _of_some(key: Key, candidates: Sequence[Candidate], cache: TuningCache) -> Candidate:
    """Of the forms that are allowed: the fastest where the class was measured, else the default."""
    choice = cache.get(key)
    ms = {} if choice is None else choice.ms
    measured = [candidate for candidate in candidates if candidate.label in ms]
    if measured:
        return min(measured, key=lambda candidate: (ms[candidate.label], candidate.label))
    names = (default_form(key.problem, key.mode), candidates[-1].name)
    return next(c for name in names for c in candidates if c.name == name)


_tuners: dict[tuple[str, str | None], tuple[dist.ProcessGroup, TuningCache, Tuner]] = {}


def _tuner_of(
    group: dist.ProcessGroup, path: str | None, device: torch.device
) -> tuple[TuningCache, Tuner]:
    """The tuner of a group and file. Making it is collective."""
    found = _tuners.get((group.group_name, path))
    if found is None or found[0] is not group:
        cache = TuningCache() if path is None else TuningCache.load(path)
        cache.replace([*TuningCache.load(SHIPPED).entries(), *cache.entries()])
        timer = EagerTimer(group) if device.type == "cuda" else HostTimer(group)
        found = group, cache, Tuner(cache, group, timer)
        _tuners[group.group_name, path] = found
    return found[1:]


_said: set[str] = set()


def _say_once(group: dist.ProcessGroup, x: Tensor, obstacle: str) -> None:
    """That the reference runs, and why. Where there are GPUs it is a warning."""
    if obstacle not in _said and group.rank() == 0:
        level = logging.WARNING if x.is_cuda else logging.INFO
        logger.log(level, "flux operators take the reference form: %s", obstacle)
    _said.add(obstacle)


def _readable(x: Tensor) -> Tensor:
    """`x`, or a copy where it has gaps or begins at an address that 16 does not divide."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _devices_of(group: dist.ProcessGroup) -> frozenset[str]:
    """Types of devices whose tensors the group's backends move."""
    parts = (part.split(":") for part in dist.get_backend_config(group).split(","))
    return frozenset(device for device, _ in parts)
