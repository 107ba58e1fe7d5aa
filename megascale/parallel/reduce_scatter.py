"""A bucket's gradients summed over data ranks into each rank's own range: two ways to travel.

`InMainDtype` is the collective. `InBfloat16` sends each shard to its owner in bf16 and sums there
in the main dtype (MegaScale 3.2's option): half the bytes, and no partial sum is ever rounded to
bf16. The own part is not rounded at all; the others are added in the order of ranks, so results
repeat bit by bit. With gradients g_r of rank r the error of the sum on rank o is at most
    2^-8 * sum over r != o of |g_r|        (bf16 has 8 bits of significand)
plus that of summing in the main dtype. Infinities and NaNs stay what they are.

On CUDA the cast and the sum, 12 bytes an element together, run on a stream of their own beside the
backward pass: the sum of one bucket, then the cast of the next.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.collectives import Pending, reduce_scatter_into
from megascale.parallel.buckets import Bucket

BF16_ROUNDING = 2.0**-8  # largest relative error of a cast to bf16


class Reduction(Protocol):
    """How gradients are summed. `op` names the collective in spans."""

    op: str

    def itemsize(self, full: Tensor) -> int:
        """Bytes with which an element of `full` travels."""

    def start(self, bucket: Bucket, full: Tensor, group: dist.ProcessGroup) -> Pending:
        """Begin to sum `full` [bucket.num_elements]; the result is this rank's range of the sum. It
        may lie in `full`, which is not to be touched before the result is there."""


class InMainDtype:
    """A reduce-scatter. NCCL writes into the rank's own range."""

    op = "reduce_scatter"

    def itemsize(self, full: Tensor) -> int:
        return full.itemsize

    def start(self, bucket: Bucket, full: Tensor, group: dist.ProcessGroup) -> Pending:
        own = full[bucket.shard_start : bucket.shard_stop]
        out = own if full.is_cuda else torch.empty_like(own)  # gloo cannot work in place
        return reduce_scatter_into(out, full, group)


class InBfloat16:
    """All-to-all of bf16 shards, summed by their owners in the main dtype."""

    op = "all_to_all"

    def itemsize(self, full: Tensor) -> int:  # noqa: ARG002 - whatever it is
        return torch.bfloat16.itemsize

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def start(self, bucket: Bucket, full: Tensor, group: dist.ProcessGroup) -> Pending:
        own = full[bucket.shard_start : bucket.shard_stop]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(full.device))
        with self._beside():
            sent = full.to(torch.bfloat16)
            received = torch.empty_like(sent).view(group.size(), -1)
            work = dist.all_to_all_single(  # as bytes: gloo knows no bf16 here
                received.view(-1).view(torch.uint8),
                sent.view(torch.uint8),
                group=group,
                async_op=True,
            )
            pending = _Summing(own, received, bucket.data_rank, work, sent)
            if self._stream is None:
                return pending
            pending.wait()  # orders the stream, not the host
            done = torch.cuda.Event()
            done.record(self._stream)
        return _OnStream(own, done)

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Summing(Pending):
    """Shards on their way; whoever waits sums them."""

    def __init__(
        self, own: Tensor, received: Tensor, data_rank: int, work: dist.Work, sent: Tensor
    ) -> None:
        super().__init__(own, work, keep=sent)
        self._parts: list[Tensor] = [p for r, p in enumerate(received) if r != data_rank]

    def wait(self) -> Tensor:
        own = super().wait()
        for part in self._parts:
            own.add_(part)
        self._parts = []
        return own


class _OnStream(Pending):
    """A value that another stream finishes."""

    def __init__(self, value: Tensor, done: torch.cuda.Event) -> None:
        super().__init__(value, None)
        self._done = done

    def wait(self) -> Tensor:
        self._done.wait(torch.cuda.current_stream(self._value.device))
        return self._value
