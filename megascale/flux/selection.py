"""Which form makes a call: by mode, machine, problem, and what was measured.

A call that looks like an earlier one (types, shapes, strides, devices) gets its answer from a
dictionary; the checks are made at the first. An operator then costs 6 us of host time beside its
form (an EPYC core).

Invariant: all ranks take the same form, from what is equal on all of them: the machine facts of the
group (`machine.py`) and the tuner's choices, which are made so, and m, n, k, type, layout and
settings, which are so by the contract (`operators.py`; debug mode compares what `local_checks.py`
describes). What may differ, the address and the strides of x and of a bias, decides nothing
(`readable.py`).
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import Arena
from megascale.flux.call import Bound, Call, check_tensors, is_captured, look_of
from megascale.flux.choice import choose, choose_pair
from megascale.flux.default_rule import Mode
from megascale.flux.forms import forms
from megascale.flux.gemm_reduce_scatter import pair
from megascale.flux.local_checks import MOST_ANSWERS, LocalChecks
from megascale.flux.machine import why_not_fused
from megascale.flux.problem import KERNEL_DTYPES, Op, Problem
from megascale.flux.ranks import GroupOnly
from megascale.flux.readable import readable, readable_biases
from megascale.flux.settings import Settings
from megascale.flux.tuner import REFERENCE
from megascale.kernels.remembered import Remembered

logger = logging.getLogger(__name__)


class Selection:
    """The choices of one operator object; what is measured is shared by those of a group."""

    def __init__(self, group: dist.ProcessGroup, settings: Settings) -> None:
        self.checks = LocalChecks(group, settings)
        self._group = group
        self._mode = settings.mode
        self._settings = settings
        self._deadline_ns = int(1e9 * (settings.deadline_s or 0))
        self._obstacles: dict[torch.device, str | None] = {}
        self._answers: Remembered[object, tuple[Problem, Bound]] = Remembered(MOST_ANSWERS)

    def bind(self, call: Call) -> tuple[Problem, Bound]:
        """The problem and the form for it; `call.x` becomes what that form can read.

        Raises FluxError for arguments that are wrong, or that the mode cannot run. Collective at
        the first call on a device, and with tune="now" at the first of a shape class.
        """
        look = look_of(call)
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
            call.x = readable(call.x)
            call.biases = readable_biases(call.biases)
            if call.pair is not None:
                call.pair = readable(call.pair[0]), call.pair[1]
            self._set(bound.ranks)
        return answer

    def answers(self) -> list[tuple[Problem, Bound]]:
        """The problems that were bound so far (those that are still remembered)."""
        return list(self._answers.values())

    def _answer(self, call: Call) -> tuple[Problem, Bound]:
        check_tensors(call)
        if call.pair is not None:
            return self._answer_pair(call, call.second)
        problem = self._for_kernels(call)
        if problem is None:
            return self.checks.problem(call), self._reference(call.op, call.x.device)
        axis = 0 if problem.layout == "NK" else 1
        whole = replace(problem, n=sum(weight.shape[axis] for weight in call.weights))
        arena = self.arena(call.x.device)
        return problem, choose(whole, call, arena, self._settings, _when(call.x))

    def _answer_pair(self, first: Call, second: Call) -> tuple[Problem, Bound]:
        """For two products in one: a kernel, or the products and a reduce-scatter."""
        whole = self.checks.problem_of_pair(first, second)
        by_kernels = [self._for_kernels(call) is not None for call in (first, second)]
        if all(by_kernels):
            arena = self.arena(first.x.device)
            bound = choose_pair(whole, arena, self._settings, _when(first.x))
            if bound is not None:
                return whole, bound
            if self._mode == "fused":
                _say_once(self._group, first.x, "two products are one kernel on Hopper only")
        sum_TN = first.x.new_empty(0, whole.n)  # what it is like decides who moves it
        arena_for_sum = self.arena_for_rows(sum_TN, spins=True)
        name = REFERENCE if arena_for_sum is None else "plain"
        ranks = GroupOnly(self._group, first.x.device) if arena_for_sum is None else arena_for_sum
        options = {"reduce_scatter": forms("reduce_scatter")[name]}
        return whole, Bound(name, pair.in_sequence, ranks, options)

    def _for_kernels(self, call: Call) -> Problem | None:
        """The problem where kernels run it, None where the reference does; FluxError where the mode
        allows neither."""
        if self._mode == "reference":
            return None
        if call.x.device not in self._obstacles:
            self.checks.problem(call)  # what is wrong here is said before peers are asked anything
        obstacle = self._obstacle(call.x.device)
        if obstacle is None:
            call.x, call.biases = readable(call.x), readable_biases(call.biases)
            try:
                return self.checks.problem(call, fused=True)
            except FluxError as error:
                if self._mode != "auto":
                    raise
                obstacle = str(error)
        self.checks.problem(call)  # what no form takes is an error, and no reason for the reference
        if self._mode != "auto":
            raise FluxError(
                f'mode is "{self._mode}", and {obstacle}; use mode "auto", which takes the '
                'reference where it must, or "reference"'
            )
        _say_once(self._group, call.x, obstacle)
        return None

    def arena(self, device: torch.device) -> Arena:
        """The group's symmetric memory with this operator's settings; made at first use."""
        arena = Arena.of(self._group, device)
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
        if self._mode == "reference" or self._obstacle(x_D.device) is not None:
            return None
        if spins and not (self._settings.spin and self._settings.reserve_sms == 0):
            return None
        kernels_can = x_D.dtype in KERNEL_DTYPES and x_D.shape[1] * x_D.element_size() % 16 == 0
        return self.arena(x_D.device) if kernels_can else None

    def _obstacle(self, device: torch.device) -> str | None:
        """Why kernels cannot run on this device; asks the peers at first."""
        if device not in self._obstacles:
            self._obstacles[device] = why_not_fused(self._group, device)
        return self._obstacles[device]

    def _reference(self, op: Op, device: torch.device) -> Bound:
        return Bound(REFERENCE, forms(op)[REFERENCE], GroupOnly(self._group, device))


_said: set[str] = set()


def _say_once(group: dist.ProcessGroup, x: Tensor, obstacle: str) -> None:
    """That the reference runs, and why. Where there are GPUs it is a warning."""
    if obstacle not in _said and group.rank() == 0:
        level = logging.WARNING if x.is_cuda else logging.INFO
        logger.log(level, "flux operators take the reference form: %s", obstacle)
    _said.add(obstacle)


def _when(x: Tensor) -> Mode:
    return "graph" if is_captured(x) else "eager"
