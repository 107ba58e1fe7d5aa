"""Which form makes a call: by mode, machine, problem, and what was measured.

A call that looks like an earlier one (types, shapes, strides, devices) gets its answer from a
dictionary; the checks are made at the first. An operator then costs 6 us of host time beside its
form (an EPYC core).

Invariant: all ranks take the same form, from what is equal on all of them: the machine facts of the
group (`machine.py`), types and shapes, the tuner's choices. What may differ, the address and the
strides of x, decides nothing: an x that kernels cannot read as it lies is copied. A weight is not,
that would be a pass over memory in every call.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import Arena
from megascale.flux.call import Bound, Call, check_tensors
from megascale.flux.choice import choose, choose_pair
from megascale.flux.default_rule import Mode
from megascale.flux.forms import forms
from megascale.flux.gemm_reduce_scatter import pair
from megascale.flux.machine import why_not_fused
from megascale.flux.problem import Op, Problem, check
from megascale.flux.ranks import GroupOnly
from megascale.flux.settings import Settings
from megascale.flux.tuner import REFERENCE

logger = logging.getLogger(__name__)

MOST_ANSWERS = 4096  # kept, about a kilobyte each: a server may see any number of rows

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class Selection:
    """The choices of one operator object; what is measured is shared by those of a group."""

    def __init__(self, group: dist.ProcessGroup, settings: Settings) -> None:
        self.group = group
        self.mode = settings.mode
        self._settings = settings
        self._deadline_ns = int(1e9 * (settings.deadline_s or 0))
        self._devices = _devices_of(group)
        self._obstacles: dict[torch.device, str | None] = {}
        self._answers: dict[object, tuple[Problem, Bound]] = {}

    def bind(self, call: Call) -> tuple[Problem, Bound]:
        """The problem and the form for it; `call.x` becomes what that form can read.

        Raises FluxError for arguments that are wrong, or that the mode cannot run. Collective at
        the first call on a device, and with tune="now" at the first of a shape class.
        """
        look = _look(call)
        answer = self._answers.get(look)
        if answer is None:
            answer = self._answer(call)
            if look is not None:
                if len(self._answers) >= MOST_ANSWERS:
                    self._answers.clear()
                self._answers[look] = answer
        bound = answer[1]
        if bound.name != REFERENCE:
            call.x = _readable(call.x)
            if call.pair is not None:
                call.pair = _readable(call.pair[0]), call.pair[1]
            self._set(bound.ranks)
        return answer

    def _answer(self, call: Call) -> tuple[Problem, Bound]:
        check_tensors(call)
        if call.pair is not None:
            return self._answer_pair(call, call.second)
        problem = self._for_kernels(call)
        if problem is None:
            return self.checked(call), self._reference(call.op, call.x.device)
        axis = 0 if problem.layout == "NK" else 1
        whole = replace(problem, n=sum(weight.shape[axis] for weight in call.weights))
        arena = self.arena(call.x.device)
        return problem, choose(whole, call, arena, self._settings, _when(call.x))

    def _answer_pair(self, first: Call, second: Call) -> tuple[Problem, Bound]:
        """For two products in one: a kernel, or the products and a reduce-scatter."""
        one, other = self.checked(first), self.checked(second)
        if (one.m, one.n) != (other.m, other.n):
            raise FluxError(
                f"the products are [{one.m}, {one.n}] and [{other.m}, {other.n}]; to be summed "
                "they must be equal"
            )
        whole = replace(one, k=one.k + other.k)
        by_kernels = [self._for_kernels(call) is not None for call in (first, second)]
        if all(by_kernels):
            arena = self.arena(first.x.device)
            bound = choose_pair(whole, arena, self._settings, _when(first.x))
            if bound is not None:
                return whole, bound
            if self.mode == "fused":
                _say_once(self.group, first.x, "two products are one kernel on Hopper only")
        sum_TN = first.x.new_empty(0, one.n)  # what it is like decides who moves it
        arena_for_sum = self.arena_for_rows(sum_TN, spins=True)
        name = REFERENCE if arena_for_sum is None else "plain"
        ranks = GroupOnly(self.group, first.x.device) if arena_for_sum is None else arena_for_sum
        options = {"reduce_scatter": forms("reduce_scatter")[name]}
        return whole, Bound(name, pair.in_sequence, ranks, options)

    def _for_kernels(self, call: Call) -> Problem | None:
        """The problem where kernels run it, None where the reference does; FluxError where the mode
        allows neither."""
        if self.mode == "reference":
            return None
        if call.x.device not in self._obstacles:
            self.checked(call)  # what is wrong here is said before peers are asked anything
        obstacle = self._obstacle(call.x.device)
        if obstacle is None:
            call.x = _readable(call.x)
            try:
                return self.checked(call, fused=True)
            except FluxError as error:
                if self.mode != "auto":
                    raise
                obstacle = str(error)
        self.checked(call)  # what no form takes is an error, and no reason for the reference
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
        self._set(arena)
        if arena.num_sms < 1:
            raise FluxError(
                f"reserve_sms is {self._settings.reserve_sms}, and the device has "
                f"{arena.num_sms + self._settings.reserve_sms} SMs; leave some to the GEMM"
            )
        return arena

    def _set(self, arena: Arena) -> None:
        """Several operators share an arena: a call has the settings of its own."""
        arena.reserved_sms, arena.deadline_ns = self._settings.reserve_sms, self._deadline_ns

    def arena_for_rows(self, x_D: Tensor, *, spins: bool) -> Arena | None:
        """The arena where our collectives move such rows, None where the backend's must.

        x_D    the input or the product of an operator
        spins  kernels of the collective wait on more SMs than a reserve leaves
        """
        if self.mode == "reference" or self._obstacle(x_D.device) is not None:
            return None
        if spins and not (self._settings.spin and self._settings.reserve_sms == 0):
            return None
        kernels_can = x_D.dtype in KERNEL_DTYPES and x_D.shape[1] * x_D.element_size() % 16 == 0
        return self.arena(x_D.device) if kernels_can else None

    def checked(self, call: Call, *, fused: bool = False) -> Problem:
        """The problem, by what this rank alone knows. FluxError for what no form takes, or with
        `fused` kernels do not."""
        check_tensors(call)
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


_said: set[str] = set()


def _say_once(group: dist.ProcessGroup, x: Tensor, obstacle: str) -> None:
    """That the reference runs, and why. Where there are GPUs it is a warning."""
    if obstacle not in _said and group.rank() == 0:
        level = logging.WARNING if x.is_cuda else logging.INFO
        logger.log(level, "flux operators take the reference form: %s", obstacle)
    _said.add(obstacle)


def _look(call: Call) -> object | None:
    """What the answer depends on, as a key; None where an argument is no tensor.

    Addresses are in it only as far as 16 divides those of weights, which kernels need.
    """
    x, misaligned = call.x, 0
    try:
        parts: list[object] = [x.shape, x.dtype, x.device, _capturing(x)]
        for weight in call.weights:
            parts += (weight.shape, weight.stride(), weight.dtype, weight.device)
            misaligned |= weight.data_ptr()
        for bias in call.biases:
            parts += (None,) if bias is None else (bias.shape, bias.dtype, bias.device)
        if call.pair is not None:
            parts.append(_look(call.second))
    except AttributeError:
        return None
    return (call.layout, call.num_rows, misaligned % 16 == 0, *parts)


def _when(x: Tensor) -> Mode:
    return "graph" if _capturing(x) else "eager"


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _readable(x: Tensor) -> Tensor:
    """`x`, or a copy where it has gaps or begins at an address that 16 does not divide."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _devices_of(group: dist.ProcessGroup) -> frozenset[str]:
    """Types of devices whose tensors the group's backends move."""
    parts = (part.split(":") for part in dist.get_backend_config(group).split(","))
    return frozenset(device for device, _ in parts)
