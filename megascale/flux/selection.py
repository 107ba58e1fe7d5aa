"""Which form makes a call: by mode, machine, problem, and what was measured.

A call that looks like an earlier one (types, shapes, strides, devices) gets its answer from a
dictionary; the checks are made at the first. An operator then costs 6 us of host time beside its
form (an EPYC core).

Invariant: all ranks take the same form, from what is equal on all of them: the machine facts of the
group (`machine.py`) and the tuner's choices, which are made so, and m, n, k, type, layout and
settings, which are so by the contract (`operators.py`; debug mode compares `described`). What may
differ, the address and the strides of x and of a bias, decides nothing: one that kernels cannot
read as it lies is copied. A weight is not, that would be a pass over memory in every call: whether
it lies as kernels need it is part of the contract.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import Arena
from megascale.flux.call import Bound, Call, check_sum, check_tensors
from megascale.flux.choice import choose, choose_pair
from megascale.flux.default_rule import Mode
from megascale.flux.forms import forms
from megascale.flux.gemm_reduce_scatter import pair
from megascale.flux.machine import why_not_fused
from megascale.flux.problem import Op, Problem, check, check_rows
from megascale.flux.ranks import GroupOnly
from megascale.flux.remembered import Remembered
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
        self._answers: Remembered[object, tuple[Problem, Bound]] = Remembered(MOST_ANSWERS)
        self._rows: Remembered[object, int] = Remembered(MOST_ANSWERS)

    def bind(self, call: Call) -> tuple[Problem, Bound]:
        """The problem and the form for it; `call.x` becomes what that form can read.

        Raises FluxError for arguments that are wrong, or that the mode cannot run. Collective at
        the first call on a device, and with tune="now" at the first of a shape class.
        """
        look = _look(call)
        try:
            answer = self._answers.get(look)
        except TypeError:  # an argument that has no hash: what is asked next refuses it
            answer = look = None
        if answer is None:
            answer = self._answer(call)
            if look is not None:
                self._answers[look] = answer
        bound = answer[1]
        if bound.name != REFERENCE:
            call.x = _readable(call.x)
            call.biases = _readable_biases(call.biases)
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
        whole = self._checked_pair(first, second)
        by_kernels = [self._for_kernels(call) is not None for call in (first, second)]
        if all(by_kernels):
            arena = self.arena(first.x.device)
            bound = choose_pair(whole, arena, self._settings, _when(first.x))
            if bound is not None:
                return whole, bound
            if self.mode == "fused":
                _say_once(self.group, first.x, "two products are one kernel on Hopper only")
        sum_TN = first.x.new_empty(0, whole.n)  # what it is like decides who moves it
        arena_for_sum = self.arena_for_rows(sum_TN, spins=True)
        name = REFERENCE if arena_for_sum is None else "plain"
        ranks = GroupOnly(self.group, first.x.device) if arena_for_sum is None else arena_for_sum
        options = {"reduce_scatter": forms("reduce_scatter")[name]}
        return whole, Bound(name, pair.in_sequence, ranks, options)

    def _checked_pair(self, first: Call, second: Call) -> Problem:
        """The problem of both products together."""
        one, other = self.checked(first), self.checked(second)
        check_sum(first, one, other)
        return replace(one, k=one.k + other.k)

    def _for_kernels(self, call: Call) -> Problem | None:
        """The problem where kernels run it, None where the reference does; FluxError where the mode
        allows neither."""
        if self.mode == "reference":
            return None
        if call.x.device not in self._obstacles:
            self.checked(call)  # what is wrong here is said before peers are asked anything
        obstacle = self._obstacle(call.x.device)
        if obstacle is None:
            call.x, call.biases = _readable(call.x), _readable_biases(call.biases)
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
            names=call.names,
        )
        self._check_device(call.names[0], call.x.device)
        return problem

    def rows(self, x: Tensor, num_rows: int | None) -> int:
        """T of an all-gather of x without a GEMM; FluxError where it cannot be."""
        look: object = None
        try:
            look = (x.shape, x.device, type(num_rows), num_rows)
            found = self._rows.get(look)
        except (AttributeError, TypeError):  # an argument of a wrong type: refused next
            found = None
        if found is None:
            found = check_rows(x, num_rows, self.group)
            self._check_device("x", x.device)
            self._rows[look] = found
        return found

    def described(self, call: Call) -> str:
        """What must be equal on all ranks, in words; FluxError for what no form takes."""
        check_tensors(call)
        if call.pair is None:
            problem, weights = self.checked(call), list(call.weights)
        else:
            problem = self._checked_pair(call, call.second)
            weights = [*call.weights, call.pair[1]]
        axis = 0 if call.layout == "NK" else 1
        columns = "+".join(str(weight.shape[axis]) for weight in call.weights)
        text = (
            f"{call.op} m={problem.m} n={columns} k={problem.k} {problem.dtype} {call.layout} "
            f"{self._settings.of_all_ranks}"
        )
        if call.x.is_cuda and not all(map(_is_readable, weights)):
            text += ", a weight that kernels cannot read as it lies"
        return text + (", a pair" if call.pair is not None else "")

    def described_rows(self, x: Tensor, num_rows: int | None) -> str:
        """The same of an all-gather without a GEMM."""
        m = self.rows(x, num_rows)
        return f"all_gather m={m} k={x.shape[1]} {x.dtype} {self._settings.of_all_ranks}"

    def _check_device(self, name: str, device: torch.device) -> None:
        if device.type not in self._devices:
            raise FluxError(
                f"{name} is on {device}, and the backend of the group moves tensors of "
                f"{' and '.join(sorted(self._devices))} only"
            )
        if device.type == "cuda":
            refuse_other_device(name, device, torch.cuda.current_device())

    def _obstacle(self, device: torch.device) -> str | None:
        """Why kernels cannot run on this device; asks the peers at first."""
        if device not in self._obstacles:
            self._obstacles[device] = why_not_fused(self.group, device)
        return self._obstacles[device]

    def _reference(self, op: Op, device: torch.device) -> Bound:
        return Bound(REFERENCE, forms(op)[REFERENCE], GroupOnly(self.group, device))


def refuse_other_device(name: str, device: torch.device, current: int) -> None:
    """Kernels and streams are those of the current device: FluxError where `device` is another."""
    if device.index != current:
        raise FluxError(
            f"{name} is on {device} and the current device is cuda:{current}; call "
            f"torch.cuda.set_device({device.index}) first"
        )


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
    return (call.layout, type(call.num_rows), call.num_rows, misaligned % 16 == 0, *parts)


def _when(x: Tensor) -> Mode:
    return "graph" if _capturing(x) else "eager"


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_readable(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def _readable(x: Tensor) -> Tensor:
    """`x`, or a copy where it has gaps or begins at an address that 16 does not divide."""
    return x if _is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _readable_biases(biases: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Kernels load a bias by its address plus the column."""
    for bias in biases:
        if bias is not None and not _is_readable(bias):
            return [None if bias is None else _readable(bias) for bias in biases]
    return biases


def _devices_of(group: dist.ProcessGroup) -> frozenset[str]:
    """Types of devices whose tensors the group's backends move."""
    parts = (part.split(":") for part in dist.get_backend_config(group).split(","))
    return frozenset(device for device, _ in parts)
