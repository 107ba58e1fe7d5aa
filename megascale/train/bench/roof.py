"""The roof of a step: nothing but its matrix products and its attention, on this GPU, now.

One rank's share of a micro-batch at the fastest library speed: each linear as cuBLAS has it
(forward, input gradient, weight gradient with the output in the compute type), attention forward
and backward by the fastest kernel there is (`ops/attention.py`). No norm, no activation, no
residual, no accumulation in fp32, no optimizer, no communication, no host. Random data, and long
enough for the clocks to settle under load. The roof is the MFU of that, by the formula of the
step's MFU, so a step's MFU over the roof is the share that it keeps.

A pipeline stage has its share of layers and head; the roof is that of stages in perfect balance,
which is the whole model's on one rank.

Every rank of a run measures it right before its steps and right after them, all at the same time:
the same GPU, the same minute, the same heat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.config import RunConfig
from megascale.ops.attention import attention
from megascale.parallel.tensor import padded_vocab_rows
from megascale.topology import Mesh
from megascale.train.assemble import DTYPES
from megascale.units import flops_per_token


@dataclass(frozen=True)
class Share:
    """One tensor-parallel rank's part of a micro-batch through the whole model.

    linears  (output columns, inputs) of those of a layer
    head     (vocabulary columns, inputs)
    heads    query heads, key-value heads, size of one
    flops    forward and backward, attention in full: what MFU counts
    """

    tokens: int
    sequences: int
    layers: int
    linears: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    heads: tuple[int, int, int]
    window: int | None
    flops: float


@dataclass(frozen=True)
class Roof:
    """`seconds` of a share, the median of rounds; `tflops` as MFU counts them."""

    seconds: float
    tflops: float


def share_of(config: RunConfig, mesh: Mesh) -> Share:
    """The block decides which linears are one: the parallel block joins those into a layer."""
    model, training, tp = config.model, config.training, mesh.tensor
    hidden, ffn = model.hidden_size, model.ffn_size // tp
    size, queries, kv = model.dim_per_head, model.num_heads // tp, model.kv_heads // tp
    qkv, fc1 = (queries + 2 * kv) * size, ffn * (2 if model.gated else 1)
    into = ((qkv + fc1, hidden),) if model.block == "parallel" else ((qkv, hidden), (fc1, hidden))
    tokens = training.micro_batch_size * training.seq_len
    return Share(
        tokens=tokens,
        sequences=training.micro_batch_size,
        layers=model.num_layers,
        linears=(*into, (hidden, queries * size), (hidden, ffn)),
        head=(padded_vocab_rows(model.vocab, tp) if tp > 1 else model.vocab, hidden),
        heads=(queries, kv, size),
        window=model.attention_window,
        flops=flops_per_token(model, training.seq_len, "full") * tokens / tp,
    )


class RoofWork:
    """The products and the attention of a share, with random operands; layers share theirs."""

    def __init__(self, share: Share, dtype: torch.dtype, device: torch.device) -> None:
        self.share = share
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=generator)

        def linear(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
            weight = random(outputs, inputs) * inputs**-0.5
            return random(share.tokens, inputs), weight, random(share.tokens, outputs)

        self._linears = [linear(*shape) for shape in share.linears]
        self._head = linear(*share.head)
        queries, kv, size = share.heads
        seq_len = share.tokens // share.sequences
        self._qkv = [
            random(share.sequences, seq_len, heads, size).requires_grad_()
            for heads in (queries, kv, kv)
        ]
        self._gradient = random(share.sequences, seq_len, queries, size)

    def once(self) -> None:
        """A micro-batch: forward of all layers, the head, backward of all layers."""
        outputs = []
        for _ in range(self.share.layers):
            for x, weight, _ in self._linears:
                F.linear(x, weight)
            q, k, v = self._qkv
            outputs.append(attention(q, k, v, window=self.share.window))
        F.linear(self._head[0], self._head[1])
        _backward(*self._head)
        while outputs:
            torch.autograd.grad(outputs.pop(), self._qkv, self._gradient)
            for one in self._linears:
                _backward(*one)


@torch.no_grad()
def _backward(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    torch.mm(gradient, weight)
    torch.mm(gradient.t(), x)


def measure_roof(
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    *,
    warm_up_s: float = 3.0,
    round_s: float = 0.5,
    rounds: int = 5,
) -> Roof:
    """Run the share for `warm_up_s`, then `rounds` of about `round_s`; the median of them.

    What it allocated is given back, and memory statistics begin anew.
    """
    share = share_of(config, mesh)
    work = RoofWork(share, DTYPES[config.training.dtype], device)
    synchronise = torch.cuda.synchronize if device.type == "cuda" else _nothing
    a_time, num_warm = 0.0, 0
    begin = time.monotonic()
    while num_warm < 2 or time.monotonic() - begin < warm_up_s:
        a_time = _timed(work, 1, synchronise)
        num_warm += 1
    repeats = max(1, round(round_s / a_time))
    seconds = statistics.median(_timed(work, repeats, synchronise) for _ in range(rounds))
    del work
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return Roof(seconds, share.flops / seconds / 1e12)


def _timed(work: RoofWork, repeats: int, synchronise: Callable[[], object]) -> float:
    """Seconds of one share, of `repeats` that run without a pause."""
    synchronise()
    begin = time.monotonic()
    for _ in range(repeats):
        work.once()
    synchronise()
    return (time.monotonic() - begin) / repeats


def _nothing() -> None:
    pass
