"""What is alive within one step of a pipeline stage, between the actions that make and take it.

Invariant: after the last action nothing is left (`assert_empty`).
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge

from megascale.ops.deferred import DeferredWork
from megascale.parallel.shared_head import SummedGradient
from megascale.parallel.transfers import Receive
from megascale.plan.actions import ActionKind, PipelineShape

Key = tuple[int, int]
"""(chunk, micro-batch)."""


class StepStore:
    """By chunk and micro-batch, what one compute or transfer leaves for another."""

    def __init__(self, shape: PipelineShape) -> None:
        self.last_chunk = shape.last_chunk
        self.losses: dict[int, Tensor] = {}
        self.inputs: dict[Key, Tensor | None] = {}
        self.roots: dict[Key, Tensor | GradientEdge] = {}
        self.receives: dict[tuple[ActionKind, int, int], Receive] = {}
        self.to_send: dict[tuple[ActionKind, int, int], Tensor] = {}
        self.deferred: dict[Key, DeferredWork] = {}
        self.head_inputs: dict[int, Tensor] = {}
        self.head_gradients: dict[int, SummedGradient] = {}
        self.head_pending: list[SummedGradient] = []  # kept alive until it has left
        self.waiting: dict[int, list[DeferredWork]] = {c: [] for c in range(shape.num_chunks + 1)}
        self._backwards_left = dict.fromkeys(range(shape.num_chunks + 1), shape.micro_batches)

    def counts_last_backward(self, chunk: int) -> bool:
        """Count a backward of `chunk`; whether it is the last of the step."""
        self._backwards_left[chunk] -= 1
        return self._backwards_left[chunk] == 0

    def wait_for_head(self) -> None:
        """What this stage gave to the sum of a shared head's gradient has left."""
        while self.head_pending:
            self.head_pending.pop().wait()

    def assert_empty(self) -> None:
        left: list[object] = [
            *self.inputs,
            *self.roots,
            *self.receives,
            *self.to_send,
            *self.deferred,
        ]
        left += [*self.head_inputs, *self.head_gradients]
        left += [chunk for chunk, waiting in self.waiting.items() if waiting]
        assert not left, f"left over after the step: {left}"
