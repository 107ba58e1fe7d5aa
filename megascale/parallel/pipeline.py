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

Backward in halves: BACKWARD_INPUT runs autograd with weight gradients deferred (`ops/deferred.py`),
BACKWARD_WEIGHT runs what was deferred. `join_weight_gradients` = K puts weight gradients off
further, until K micro-batches of a chunk have theirs waiting (or the chunk's last one has), and
runs them as joined GEMMs. Every schedule then has halves, the gradient's send between the two: the
stage before does not wait for K micro-batches' weight gradients. Data parallelism is told of the
weights, not of the inputs: a bucket that left before its weight gradients would be wrong.

A shared head (`shared_head.py`) computes forward and backward of the head in one HEAD action, so
the last chunk ends in hidden states, and its backward starts from their gradient.

Coupled transfers are the baseline of the ablation, which does what Megatron-LM did at the commit
that MegaScale compares itself with (285068c8): after each batch of transfers the host waits for
the whole device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megascale.ops.deferred import DeferredWork, deferring
from megascale.ops.deferred import run as run_deferred
from megascale.ops.joined import accumulate_joined
from megascale.parallel.chunk_program import ChunkProgram
from megascale.parallel.spans import Span, no_span
from megascale.parallel.step_store import StepStore
from megascale.parallel.transfers import Link, Transfers
from megascale.plan.actions import RECEIVES, SENDS, Action, ActionKind, Channel, PipelineShape
from megascale.plan.schedules import build_stage

OnBackward = Callable[[int, int, bool], None]
"""`f(chunk, micro_batch, last)`; `last`: the chunk's last weight gradients of the step."""


def wait_for_device(device: torch.device) -> None:
    """The host waits until everything launched has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ignore(_chunk: int, _micro_batch: int, _last: bool) -> None:
    pass


class PipelineRuntime:
    """Runs steps of one stage.

    links                  from `create_links`; empty for one stage
    shared_head            the program is a `HeadProgram`; its schedule has HEAD actions
    join_weight_gradients  micro-batches whose weight gradients are computed together
    on_backward_start      before each chunk's weight gradients: its backward, or what it deferred
    on_backward_done       after them: the place where data parallelism starts its reduce-scatter
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
        join_weight_gradients: int = 1,
        shared_head: bool = False,
        on_backward_start: OnBackward = _ignore,
        on_backward_done: OnBackward = _ignore,
        span: Span = no_span,
    ) -> None:
        self._program = program
        self._stage, self._stages, self._chunks_per_stage = stage, stages, chunks_per_stage
        self._schedule, self._transfer_mode = schedule, transfers
        self._on_backward_start, self._on_backward_done = on_backward_start, on_backward_done
        assert join_weight_gradients >= 1, join_weight_gradients
        self._joined = join_weight_gradients
        self._shared_head = shared_head
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
                schedule,
                shape,
                self._stage,
                transfers=self._transfer_mode,
                shared_head=self._shared_head,
                split_backward=self._joined > 1,
            )
        step = StepStore(shape)
        for action in self._actions[key]:
            self._execute(step, action)
        with self._span("pp_finish"):
            self._transfers.finish()
            step.wait_for_head()
        step.assert_empty()
        return [step.losses[m] for m in sorted(step.losses)]

    def _execute(self, step: StepStore, action: Action) -> None:
        chunk, m = action.chunk, action.micro_batch
        if action.kind is ActionKind.FORWARD:
            self._forward(step, chunk, m)
        elif action.kind is ActionKind.BACKWARD:
            self._backward(step, chunk, m)
        elif action.kind is ActionKind.BACKWARD_INPUT:
            self._input_gradient(step, chunk, m)
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            self._weight_gradients(step, chunk, m)
        elif action.kind is ActionKind.HEAD:
            self._head(step, chunk, m)
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
            "num_bytes": self._transfers.num_bytes,
            "stream": "pipeline",
        }

    def _forward(self, step: StepStore, chunk: int, m: int) -> None:
        x = None
        if chunk > 0:
            x = self._received(step, ActionKind.RECV_ACTIVATION, chunk, m)
            x.requires_grad_(torch.is_grad_enabled())
        with self._span("forward", chunk=chunk, micro_batch=m):
            y = self._program.forward(chunk, m, x)
        if torch.is_grad_enabled():
            step.inputs[chunk, m] = x
            is_loss = chunk == step.last_chunk and not self._shared_head
            step.roots[chunk, m] = y if is_loss else get_gradient_edge(y)
        if chunk == step.last_chunk and self._shared_head:
            step.head_inputs[m] = y.detach()
        elif chunk == step.last_chunk:
            step.losses[m] = y.detach()
        else:
            step.to_send[ActionKind.SEND_ACTIVATION, chunk, m] = y.detach()

    def _backward(self, step: StepStore, chunk: int, m: int) -> None:
        assert self._joined == 1, f"a whole backward does not join {self._joined} micro-batches"
        gradient = self._output_gradient(step, chunk, m)
        last = step.counts_last_backward(chunk)
        self._on_backward_start(chunk, m, last)
        with self._span("backward", chunk=chunk, micro_batch=m):
            torch.autograd.backward(step.roots.pop((chunk, m)), gradient)
        self._on_backward_done(chunk, m, last)
        self._keep_to_send(step, chunk, m)

    def _input_gradient(self, step: StepStore, chunk: int, m: int) -> None:
        """Backward without the weights' gradients, which are deferred."""
        gradient = self._output_gradient(step, chunk, m)
        work = step.deferred[chunk, m] = DeferredWork(keeps_gathered=self._joined > 1)
        with self._span("backward_input", chunk=chunk, micro_batch=m), deferring(work):
            torch.autograd.backward(step.roots.pop((chunk, m)), gradient)
        self._keep_to_send(step, chunk, m)

    def _weight_gradients(self, step: StepStore, chunk: int, m: int) -> None:
        """What this micro-batch deferred, once enough others wait with it."""
        waiting = step.waiting[chunk]
        waiting.append(step.deferred.pop((chunk, m)))
        last = step.counts_last_backward(chunk)
        if len(waiting) < self._joined and not last:
            return
        self._on_backward_start(chunk, m, last)
        op = f"{len(waiting)} joined" if len(waiting) > 1 else None
        with self._span("backward_weight", chunk=chunk, micro_batch=m, op=op):
            run_deferred(waiting, accumulate_joined)
        waiting.clear()
        self._on_backward_done(chunk, m, last)

    def _head(self, step: StepStore, chunk: int, m: int) -> None:
        """Forward and backward of the own rows; their weight gradients under the sum of the hidden
        states' gradient."""
        step.wait_for_head()
        program = self._program
        work = DeferredWork(keeps_gathered=True)  # it runs at once: nothing would hide a gather
        with self._span("head", chunk=chunk, micro_batch=m), deferring(work):
            loss, gradient = program.head(m, step.head_inputs.pop(m, None))  # type: ignore[attr-defined]
        if self._stage == self._stages - 1:
            step.losses[m] = loss.detach()
        if gradient is None:
            return
        step.deferred[chunk, m] = work
        self._weight_gradients(step, chunk, m)
        if self._stage == self._stages - 1:
            step.head_gradients[m] = gradient
        else:
            step.head_pending.append(gradient)

    def _output_gradient(self, step: StepStore, chunk: int, m: int) -> Tensor | None:
        """The gradient of a chunk's output; None for the last chunk, if its output is the loss."""
        if chunk == step.last_chunk and not self._shared_head:
            return None
        if chunk == step.last_chunk:
            with self._span("pp_wait", op="head", chunk=chunk, micro_batch=m):
                return step.head_gradients.pop(m).wait()
        return self._received(step, ActionKind.RECV_GRADIENT, chunk, m)

    def _keep_to_send(self, step: StepStore, chunk: int, m: int) -> None:
        """The gradient of a chunk's input, for the send that follows."""
        x = step.inputs.pop((chunk, m))
        if x is not None:
            assert x.grad is not None, f"chunk {chunk} did not use its input"
            step.to_send[ActionKind.SEND_GRADIENT, chunk, m] = x.grad

    def _received(self, step: StepStore, kind: ActionKind, chunk: int, m: int) -> Tensor:
        receive = step.receives.pop((kind, chunk, m))
        with self._span("pp_wait", op=kind.value, chunk=chunk, micro_batch=m):
            return receive.wait()

    def _wait_for_all(self, step: StepStore) -> None:
        with self._span("pp_wait", op="all"):
            for receive in step.receives.values():
                receive.wait()
            self._transfers.finish()
            wait_for_device(self._program.device)
