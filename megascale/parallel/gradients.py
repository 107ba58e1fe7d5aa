"""When each bucket's gradients are reduced over data ranks, and where they live until then.

ZeRO-1 keeps the full gradients of all buckets and reduces each in the last micro-batch. ZeRO-2
reduces in every micro-batch and adds up shards: a bucket has a full buffer from the backward of its
last unit until its reduction is done, so that persistent gradient memory is one shard plus the few
buckets in flight.

Reductions start in the order in which backward ends buckets, each when its first unit has ended,
and are waited for at the end of the step. With `overlap` off they start after all of backward, as
Megatron-LM did at 285068c8; under ZeRO-2, which cannot wait so long, each is waited for at once.

Matrices are not zeroed: their first contribution of a step overwrites (`ops/main_gradient.py`).
Vectors, gaps and padding, which are few, are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.collectives import Pending
from megascale.parallel.buckets import Bucket
from megascale.parallel.reduce_scatter import Reduction
from megascale.parallel.spans import Span

OnBucket = Callable[[Bucket], object]


@dataclass
class _Reducing:
    bucket: Bucket
    pending: Pending
    buffer: Tensor  # the full gradients


class Gradients(ABC):
    """The gradients of a rank's buckets, which come in the order of forward."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup | None,
        reduction: Reduction,
        *,
        overlap: bool,
        span: Span,
    ) -> None:
        self.buckets, self.group, self.reduction = buckets, group, reduction
        self.overlap, self.span = overlap, span
        self._reducing: deque[_Reducing] = deque()
        self._due: list[Bucket] = []  # of this step or backward, not reduced yet; next one first

    def start_step(self) -> None:
        """Forget the gradients of the step before; also of one that failed on its way."""
        left = [*self._reducing]
        for reducing in left:
            reducing.pending.wait()
        self._reducing.clear()
        self._due = []
        self._forget([reducing.buffer for reducing in left])

    @abstractmethod
    def _forget(self, left: list[Tensor]) -> None:
        """left: buffers of reductions whose results nobody took."""

    @abstractmethod
    def backward_started(self, chunk: int, *, last_micro_batch: bool) -> None:
        """Before weight gradients of `chunk` are computed, for one micro-batch or several."""

    @abstractmethod
    def unit_ended(self, chunk: int, unit: int) -> None:
        """All parameters of `unit` and of those behind it have their gradients; unit 0: all."""

    @abstractmethod
    def finish(self, reduced: OnBucket) -> None:
        """Wait for all reductions (on CUDA: the stream does); `reduced` is called for each bucket
        once it is reduced."""

    def _of(self, chunk: int) -> Iterator[Bucket]:
        return (bucket for bucket in self.buckets if bucket.chunk == chunk)

    def _start(self, bucket: Bucket, full: Tensor) -> None:
        assert self.group is not None
        bucket.zero_stale()
        value, degree = full[: bucket.num_elements], self.group.size()
        fields = {"op": self.reduction.op, "group": "data", "stream": "data"}
        sent_bytes = self.reduction.itemsize(value) * value.numel() * (degree - 1) // degree
        with self.span("grad_sync", bucket=bucket.name, num_bytes=sent_bytes, **fields):
            pending = self.reduction.start(bucket, value, self.group)
        self._reducing.append(_Reducing(bucket, pending, full))


class FullGradients(Gradients):
    """ZeRO-1, and one data rank: gradients of all micro-batches in one buffer a bucket."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup | None,
        reduction: Reduction,
        *,
        main_dtype: torch.dtype,
        overlap: bool,
        span: Span,
    ) -> None:
        super().__init__(buckets, group, reduction, overlap=overlap, span=span)
        self._full: dict[str, Tensor] = {}
        for bucket in buckets:
            device = bucket.parameters.device
            full = torch.zeros(bucket.num_elements, dtype=main_dtype, device=device)
            self._full[bucket.name] = full
            bucket.point_gradients_at(full)
            bucket.gradient = full[bucket.shard_start : bucket.shard_stop]

    def _forget(self, left: list[Tensor]) -> None:  # noqa: ARG002 - they are among `_full`
        for bucket in self.buckets:
            bucket.forget_gradients(self._full[bucket.name])

    def backward_started(self, chunk: int, *, last_micro_batch: bool) -> None:
        if last_micro_batch:
            self._due += reversed(list(self._of(chunk)))

    def unit_ended(self, chunk: int, unit: int) -> None:
        if self.overlap:
            self._start_due(chunk, unit)

    def _start_due(self, chunk: int, unit: int) -> None:
        ready = [b for b in self._due if b.chunk == chunk and b.first_unit >= unit]
        self._due = [b for b in self._due if b not in ready]
        for bucket in ready:
            if self.group is not None:
                self._start(bucket, self._full[bucket.name])

    def finish(self, reduced: OnBucket) -> None:
        for chunk in dict.fromkeys(bucket.chunk for bucket in self._due):
            self._start_due(chunk, 0)
        if self.group is None:
            for bucket in self.buckets:
                bucket.zero_stale()
                reduced(bucket)
        while self._reducing:
            done = self._reducing.popleft()
            result, gradient = done.pending.wait(), done.bucket.gradient
            if result.data_ptr() != gradient.data_ptr():
                gradient.copy_(result)
            reduced(done.bucket)


class ShardedGradients(Gradients):
    """ZeRO-2: shards of gradients, and full buffers of the buckets in flight."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        reduction: Reduction,
        *,
        main_dtype: torch.dtype,
        overlap: bool,
        span: Span,
    ) -> None:
        super().__init__(buckets, group, reduction, overlap=overlap, span=span)
        self._main_dtype = main_dtype
        self._full: dict[str, Tensor] = {}  # by bucket, from its backward to its reduction
        self._free: list[Tensor] = []
        self._stale: set[str] = set()  # buckets whose shard holds the step before
        for bucket in buckets:
            device = bucket.parameters.device
            bucket.gradient = torch.zeros(bucket.shard_elements, dtype=main_dtype, device=device)

    def _forget(self, left: list[Tensor]) -> None:
        self._free += [*left, *self._full.values()]
        self._full.clear()
        self._stale = {bucket.name for bucket in self.buckets}

    def backward_started(self, chunk: int, *, last_micro_batch: bool) -> None:  # noqa: ARG002
        self._due = list(reversed(list(self._of(chunk))))
        self._provide(chunk, max(bucket.last_unit for bucket in self._due))

    def unit_ended(self, chunk: int, unit: int) -> None:
        ready = [bucket for bucket in self._due if bucket.first_unit >= unit]
        self._due = [bucket for bucket in self._due if bucket.first_unit < unit]
        for bucket in ready:
            self._start(bucket, self._full.pop(bucket.name))
            while self._reducing and not self.overlap:
                self._complete_oldest()
        self._provide(chunk, unit - 1)

    def finish(self, reduced: OnBucket) -> None:
        while self._reducing:
            self._complete_oldest()
        for bucket in self.buckets:
            if bucket.name in self._stale:  # it took part in no backward
                bucket.gradient.zero_()
            reduced(bucket)
        self._stale.clear()

    def _provide(self, chunk: int, unit: int) -> None:
        """A full buffer for each bucket that has units from `unit` on."""
        for bucket in self._of(chunk):
            if bucket.last_unit >= unit and bucket in self._due and bucket.name not in self._full:
                buffer = self._take_buffer()
                self._full[bucket.name] = buffer
                bucket.point_gradients_at(buffer)
                bucket.forget_gradients(buffer)

    def _take_buffer(self) -> Tensor:
        """At most two reductions stay in flight before one is waited for."""
        while len(self._reducing) >= 2:
            self._complete_oldest()
        if self._free:
            return self._free.pop()
        size = max(bucket.num_elements for bucket in self.buckets)
        device = self.buckets[0].parameters.device
        return torch.empty(size, dtype=self._main_dtype, device=device)

    def _complete_oldest(self) -> None:
        done = self._reducing.popleft()
        result, gradient = done.pending.wait(), done.bucket.gradient
        if done.bucket.name in self._stale:
            self._stale.discard(done.bucket.name)
            gradient.copy_(result)
        else:
            gradient.add_(result)
        self._free.append(done.buffer)
