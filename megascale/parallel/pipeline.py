"""Executes one stage of a pipeline schedule: the action list made in `plan/schedules`.

MegaScale 2 and 3.2. The runtime knows no model: a `ChunkProgram` computes, `Transfers` moves
values, and the actions say in which order. One stage is the plain program: forward and backward in
turn.

Invariants:
* a compute waits for the receive that feeds it and for nothing else (but for coupled transfers,
  whose WAIT actions wait for all that was posted);
* between a chunk's forward and its backward only the graph and the chunk's input are kept: the
  output's storage is free once its send is over, because backward starts from the graph's edge;
* after a step nothing is left in flight or in store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megascale.parallel.spans import Span, no_span
from megascale.parallel.transfers import Link, Receive, Transfers
from megascale.plan.actions import RECEIVES, SENDS, Action, ActionKind, Channel, PipelineShape
from megascale.plan.schedules import build_stage

Key = tuple[int, int]
"""(chunk, micro-batch)."""

OnBackward = Callable[[int, int, bool], None]
"""`f(chunk, micro_batch, last)`; `last`: the chunk's last backward of the step."""


class ChunkProgram(Protocol):
    """Computes the chunks of one stage."""

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Local shape of the hidden states between chunks, the same for every micro-batch."""

    @property
    def hidden_dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> Tensor:
        """Hidden states after `chunk`; of the last chunk of all: the scalar loss.

        x  hidden states from the chunk before; None for chunk 0, which reads its own tokens
        """


def _ignore(_chunk: int, _micro_batch: int, _last: bool) -> None:
    pass


class PipelineRuntime:
    """Runs steps of one stage.

    links               from `create_links`; empty for one stage
    on_backward_start   before each chunk's backward
    on_backward_done    after it: the place where data parallelism starts its reduce-scatter
    Chunk numbers are global (0 .. stages * chunks_per_stage - 1) everywhere.
    """

    def __init__(
        self,
        program: ChunkProgram,
        *,
        stage: int,
        stages: int,
        chunks_per_stage: int,
        schedule: str,
        transfers: str = "decoupled",
        links: dict[Channel, Link] | None = None,
        on_backward_start: OnBackward = _ignore,
        on_backward_done: OnBackward = _ignore,
        span: Span = no_span,
    ) -> None:
        self._program = program
        self._stage, self._stages, self._chunks_per_stage = stage, stages, chunks_per_stage
        self._schedule, self._transfer_mode = schedule, transfers
        self._on_backward_start, self._on_backward_done = on_backward_start, on_backward_done
        self._span = span
        self._transfers = Transfers(
            links or {},
            shape=program.hidden_shape,
            dtype=program.hidden_dtype,
            device=program.device,
        )
        self._actions: dict[tuple[str, int], tuple[Action, ...]] = {}

    def run(self, micro_batches: int) -> list[Tensor]:
        """Forward and backward of a step. On the last stage: the detached loss of each micro-batch;
        elsewhere an empty list."""
        return self._run(self._schedule, micro_batches)

    def run_forward(self, micro_batches: int) -> list[Tensor]:
        """The forward passes alone (validation), any number of them, with the same result."""
        with torch.no_grad():
            return self._run("forward_only", micro_batches)

    def _run(self, schedule: str, micro_batches: int) -> list[Tensor]:
        shape = PipelineShape(self._stages, self._chunks_per_stage, micro_batches)
        key = schedule, micro_batches
        if key not in self._actions:
            self._actions[key] = build_stage(
                schedule, shape, self._stage, transfers=self._transfer_mode
            )
        step = _Step(shape)
        for action in self._actions[key]:
            self._execute(step, action)
        with self._span("pp_finish"):
            self._transfers.finish()
        step.assert_empty()
        return [step.losses[m] for m in sorted(step.losses)]

    def _execute(self, step: _Step, action: Action) -> None:
        chunk, m = action.chunk, action.micro_batch
        if action.kind is ActionKind.FORWARD:
            self._forward(step, chunk, m)
        elif action.kind is ActionKind.BACKWARD:
            self._backward(step, chunk, m)
        elif action.kind is ActionKind.WAIT:
            self._wait_for_all(step)
        elif action.kind in SENDS:
            channel = action.channel(self._stage)
            with self._span("send", **self._fields(channel, chunk, m)):
                self._transfers.send(channel, step.to_send.pop((action.kind, chunk, m)))
        else:
            assert action.kind in RECEIVES, action
            channel = action.channel(self._stage)
            with self._span("recv", **self._fields(channel, chunk, m)):
                step.receives[action.kind, chunk, m] = self._transfers.receive(channel)

    def _fields(self, channel: Channel, chunk: int, m: int) -> dict[str, Any]:
        """What a transfer's span says of it; the recorder numbers the transfers of a channel."""
        return {
            "op": channel.payload.value,
            "group": f"{channel.source}->{channel.destination} {channel.payload.value}",
            "chunk": chunk,
            "micro_batch": m,
            "stream": "pipeline",
        }

    def _forward(self, step: _Step, chunk: int, m: int) -> None:
        x = None
        if chunk > 0:
            x = self._received(step, ActionKind.RECV_ACTIVATION, chunk, m)
            x.requires_grad_(torch.is_grad_enabled())
        with self._span("forward", chunk=chunk, micro_batch=m):
            y = self._program.forward(chunk, m, x)
        if torch.is_grad_enabled():
            step.inputs[chunk, m] = x
            step.roots[chunk, m] = y if chunk == step.last_chunk else get_gradient_edge(y)
        if chunk == step.last_chunk:
            step.losses[m] = y.detach()
        else:
            step.to_send[ActionKind.SEND_ACTIVATION, chunk, m] = y.detach()

    def _backward(self, step: _Step, chunk: int, m: int) -> None:
        gradient = None
        if chunk < step.last_chunk:
            gradient = self._received(step, ActionKind.RECV_GRADIENT, chunk, m)
        last = step.counts_last_backward(chunk)
        self._on_backward_start(chunk, m, last)
        with self._span("backward", chunk=chunk, micro_batch=m):
            torch.autograd.backward(step.roots.pop((chunk, m)), gradient)
        self._on_backward_done(chunk, m, last)
        x = step.inputs.pop((chunk, m))
        if x is not None:
            assert x.grad is not None, f"chunk {chunk} did not use its input"
            step.to_send[ActionKind.SEND_GRADIENT, chunk, m] = x.grad

    def _received(self, step: _Step, kind: ActionKind, chunk: int, m: int) -> Tensor:
        receive = step.receives.pop((kind, chunk, m))
        with self._span("pp_wait", op=kind.value, chunk=chunk, micro_batch=m):
            return receive.wait()

    def _wait_for_all(self, step: _Step) -> None:
        with self._span("pp_wait", op="all"):
            for receive in step.receives.values():
                receive.wait()
            self._transfers.finish()


class _Step:
    """What is alive within one step."""

    def __init__(self, shape: PipelineShape) -> None:
        self.last_chunk = shape.last_chunk
        self.losses: dict[int, Tensor] = {}
        self.inputs: dict[Key, Tensor | None] = {}
        self.roots: dict[Key, Tensor | GradientEdge] = {}
        self.receives: dict[tuple[ActionKind, int, int], Receive] = {}
        self.to_send: dict[tuple[ActionKind, int, int], Tensor] = {}
        self._backwards_left = dict.fromkeys(range(shape.num_chunks), shape.micro_batches)

    def counts_last_backward(self, chunk: int) -> bool:
        """Count a backward of `chunk`; whether it is the last of the step."""
        self._backwards_left[chunk] -= 1
        return self._backwards_left[chunk] == 0

    def assert_empty(self) -> None:
        left = [*self.inputs, *self.roots, *self.receives, *self.to_send]
        assert not left, f"left over after the step: {left}"
