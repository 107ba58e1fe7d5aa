"""Marks every operator of a step on the compute stream, forward and backward, by class of work.

An operator is bracketed by two identities. The one behind it runs first in its backward and opens
the span there, the one before it runs last and closes it; the forward's span is opened and closed
around the call. So it works for one function and for a chain of them, and nothing that is bracketed
knows of it. Brackets nest, and time belongs to the innermost: that of a layer is what its
operators leave (activation, residuals, sums of gradients).

What is bracketed is replaced on the module, as an attribute of the object: `op` of the linears and
their pairs, `forward` of layers, norms and the embedding, `core` and `_heads` of attention, the
loss. Without a differentiable input (tokens) a bracket's backward ends with the pass.

Recomputation runs forwards inside backward; it may stop in the middle of one. What it left open is
closed by the next mark of the backward.

Cost: four marks and two nodes a bracket, about 40 us of the host in both passes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megascale.model.attention import Attention
from megascale.model.block import ParallelBlock, SerialBlock
from megascale.model.layers import FusedLinear, Norm, RowPair
from megascale.model.transformer import Embedding
from megascale.plan.actions import PipelineShape
from megascale.telemetry.recorder import Recorder
from megascale.telemetry.spans import OpenSpan
from megascale.train.assemble import Assembly

_PASSES = ("backward", "backward_input", "backward_weight", "head")


class _Told(torch.autograd.Function):
    """Identity; its backward calls `tell`."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.tell()
        return None, *grads


@dataclass(frozen=True, eq=False)
class _Bracket:
    """One call of an operator."""

    work: str
    key: str


@dataclass(frozen=True)
class Sample:
    """A linear as it was called: what to call, with which arguments; at the places `inputs` are
    (shape, type, device) in place of activations."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    inputs: tuple[int, ...]


class Probe:
    """The brackets of one rank. Backward passes run one at a time, so that one list is enough."""

    def __init__(self, recorder: Recorder) -> None:
        self.samples: dict[str, Sample] = {}  # of each kind of linear, by its key
        self._recorder = recorder
        self._forward: list[OpenSpan] = []
        self._backward: list[tuple[_Bracket, OpenSpan]] = []

    @contextmanager
    def span(self, name: str, /, **fields: Any) -> Iterator[None]:
        """The recorder's, which also ends what is still open at the end of a backward pass."""
        with self._recorder.span(name, **fields):
            yield
            if name in _PASSES:
                self._close_forward(0)
                while self._backward:
                    self._backward.pop()[1].end()

    def bracketed(
        self, call: Callable[..., Any], work: str, key: str, inputs: tuple[int, ...] = (0,)
    ) -> Callable[..., Any]:
        """`call`, with marks around it; `inputs` are the places of its activations."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            bracket = _Bracket(work, key)
            given, depth = list(args), len(self._forward)
            places = [i for i in inputs if i < len(given) and _differentiable(given[i])]
            if places:
                for i, x in zip(
                    places,
                    _Told.apply(partial(self.close_backward, bracket), *(given[i] for i in places)),
                    strict=True,
                ):
                    given[i] = x
                if work == "gemm" and key not in self.samples:
                    self.samples[key] = _sample(call, args, tuple(places))
            self._forward.append(self._recorder.span("op_forward", work=work, op=key).start())
            output = call(*given, **kwargs)
            self._close_forward(depth)
            several = isinstance(output, tuple)
            values = output if several else (output,)
            if any(map(_differentiable, values)):
                values = _Told.apply(partial(self.open_backward, bracket), *values)
            return values if several else values[0]

        return marked

    def open_backward(self, bracket: _Bracket) -> None:
        self._close_forward(0)
        span = self._recorder.span("op_backward", work=bracket.work, op=bracket.key).start()
        self._backward.append((bracket, span))

    def close_backward(self, bracket: _Bracket) -> None:
        """Of `bracket`, and of those inside it that no input ended."""
        self._close_forward(0)
        assert any(one is bracket for one, _ in self._backward), f"{bracket.key} did not begin"
        while True:
            ended, span = self._backward.pop()
            span.end()
            if ended is bracket:
                return

    def _close_forward(self, depth: int) -> None:
        while len(self._forward) > depth:
            self._forward.pop().end()


def _sample(call: Callable[..., Any], args: tuple[Any, ...], inputs: tuple[int, ...]) -> Sample:
    """Arguments that are made in the step (a sum of two biases) lose their history."""
    kept = [x if not isinstance(x, Tensor) or x.is_leaf else x.detach() for x in args]
    for i in inputs:
        kept[i] = (tuple(args[i].shape), args[i].dtype, args[i].device)
    return Sample(call, tuple(kept), inputs)


def _differentiable(value: Any) -> bool:
    return torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad


def attach(probe: Probe, assembly: Assembly) -> dict[str, int]:
    """Bracket everything that the model and the loss compute. The FLOPs of the GEMMs of each chunk
    on this rank, for a micro-batch, forward and backward (recomputation is not counted)."""
    program: Any = assembly.program
    training, par = assembly.config.training, assembly.config.parallelism
    tokens = training.micro_batch_size * training.seq_len
    parts: dict[int, nn.Module] = dict(assembly.chunks)
    if program.shared_head is None:
        program.loss = probe.bracketed(program.loss, "elementwise", "cross_entropy")
    else:
        head = program.shared_head
        shape = PipelineShape(par.pipeline_parallel_size, par.virtual_pipeline_size, 1)
        parts[shape.head_chunk] = head.logits
        head.loss = probe.bracketed(head.loss, "elementwise", "cross_entropy")
    flops: dict[str, int] = {}
    for number, part in parts.items():
        weights = 0
        for path, module in part.named_modules():
            _attach(probe, module, kind_of(path))
            if isinstance(module, FusedLinear | RowPair):
                weights += sum(w.numel() for w in module.parameters(recurse=False) if w.dim() > 1)
        flops[str(number)] = 6 * tokens * weights
    return flops


def kind_of(path: str) -> str:
    """What layers have in common: `layers.3.attn.qkv` is `attn.qkv`, a layer itself `layer`."""
    parts = path.split(".")
    if parts[0] == "layers":
        return ".".join(parts[2:]) or "layer"
    return path


def _attach(probe: Probe, module: nn.Module, kind: str) -> None:
    target: Any = module
    if isinstance(module, FusedLinear):
        target.op = probe.bracketed(target.op, "gemm", kind)
    elif isinstance(module, RowPair):
        target.op = probe.bracketed(target.op, "gemm", kind, inputs=(0, 2))
    elif isinstance(module, Attention):
        target.core = probe.bracketed(target.core, "attention", "attn.core")
        target._heads = probe.bracketed(target._heads, "elementwise", "attn.heads")
    elif isinstance(module, Norm):
        target.forward = probe.bracketed(target.forward, "elementwise", kind, inputs=(0, 1))
    elif isinstance(module, SerialBlock | ParallelBlock | Embedding):
        target.forward = probe.bracketed(target.forward, "elementwise", kind)
