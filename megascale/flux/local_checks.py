"""What a rank can say of a call by itself: that it is wrong, and what it is, in words.

A rank that refused after its peers had launched would leave them waiting, so this comes before
anything that is collective. Rules for arguments are in `problem.py`; here they meet the group.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.call import Call, check_sum, check_tensors
from megascale.flux.problem import Problem, check, check_rows
from megascale.flux.readable import is_readable
from megascale.flux.settings import Settings
from megascale.kernels.remembered import Remembered

MOST_ANSWERS = 4096  # kept, about a kilobyte each: a server may see any number of rows


class LocalChecks:
    """The checks of one operator object."""

    def __init__(self, group: dist.ProcessGroup, settings: Settings) -> None:
        self._group = group
        self._settings = settings
        self._devices = _devices_of(group)
        self._rows: Remembered[object, int] = Remembered(MOST_ANSWERS)

    def problem(self, call: Call, *, fused: bool = False) -> Problem:
        """The problem. FluxError for what no form takes, or with `fused` kernels do not."""
        check_tensors(call)
        problem = check(
            call.op,
            call.x,
            call.weights,
            call.biases,
            self._group,
            call.layout,
            call.num_rows,
            fused=fused,
            names=call.names,
        )
        self._check_device(call.names[0], call.x.device)
        return problem

    def problem_of_pair(self, first: Call, second: Call) -> Problem:
        """The problem of two products together."""
        one, other = self.problem(first), self.problem(second)
        check_sum(first, one, other)
        return replace(one, k=one.k + other.k)

    def rows(self, x: Tensor, num_rows: int | None) -> int:
        """T of an all-gather of x without a GEMM; FluxError where it cannot be."""
        look: object
        try:
            current = x.is_cuda and torch.cuda.current_device()
            look = (x.shape, x.device, current, type(num_rows), num_rows)
            found = self._rows.get(look)
        except (AttributeError, TypeError):  # of a wrong type, which is refused next, or no hash
            found = look = None
        if found is None:
            found = check_rows(x, num_rows, self._group)
            self._check_device("x", x.device)
            if look is not None:
                self._rows[look] = found
        return found

    def described(self, call: Call) -> str:
        """What must be equal on all ranks, in words; FluxError for what no form takes."""
        check_tensors(call)
        if call.pair is None:
            problem, weights = self.problem(call), list(call.weights)
        else:
            problem = self.problem_of_pair(call, call.second)
            weights = [*call.weights, call.pair[1]]
        axis = 0 if call.layout == "NK" else 1
        columns = "+".join(str(weight.shape[axis]) for weight in call.weights)
        text = (
            f"{call.op} m={problem.m} n={columns} k={problem.k} {problem.dtype} {call.layout} "
            f"{self._settings.of_all_ranks}"
        )
        if call.x.is_cuda and not all(map(is_readable, weights)):
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


def refuse_other_device(name: str, device: torch.device, current: int) -> None:
    """Kernels and streams are those of the current device: FluxError where `device` is another."""
    if device.index != current:
        raise FluxError(
            f"{name} is on {device} and the current device is cuda:{current}; call "
            f"torch.cuda.set_device({device.index}) first"
        )


def _devices_of(group: dist.ProcessGroup) -> frozenset[str]:
    """Types of devices whose tensors the group's backends move."""
    parts = (part.split(":") for part in dist.get_backend_config(group).split(","))
    return frozenset(device for device, _ in parts)
