"""Sharded data parallelism, ZeRO-1 and ZeRO-2, with its communication overlapped (MegaScale 3.2).

Every data rank owns one range of each bucket: its fp32 master, its optimizer state, its reduced
gradient. A step is
    start_step, backward of all micro-batches, finish_gradients, optimizer, gather_parameters
and the communication hides like this:
* a bucket's reduce-scatter starts when the backward of its first unit has ended, while backward
  goes on below it. ZeRO-1 does so in the last micro-batch only; ZeRO-2 in every one, and adds up
  shards, so that persistent gradient memory is one shard plus the few buckets in flight.
* a bucket's all-gather starts as soon as its masters are updated and is waited for by the first
  unit of the bucket in the next forward.

The order of events inside one chunk's backward is known from boundaries: an identity operator in
front of each unit whose backward runs when everything behind it has its gradients.

Gradients are SUMMED over data ranks: the loss is scaled by the global token count, so no mean of
means appears. Parameters replicated over tensor ranks have partial gradients: they are summed over
that group after the reduce-scatter, on the shard alone, where they are 1 / data the size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale.flux.collectives import Pending, all_gather_into, reduce_scatter_into
from megascale.optim import Flat, Segment
from megascale.parallel.buckets import Bucket, OwnedBlock, one_run
from megascale.parallel.groups import Groups
from megascale.parallel.spans import Span, no_span


class _Boundary(torch.autograd.Function):
    """Identity; its backward tells the engine that a unit's backward has ended."""

    @staticmethod
    def forward(ctx, x, engine, chunk, unit):  # type: ignore[no-untyped-def]
        ctx.place = engine, chunk, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        engine, chunk, unit = ctx.place
        engine.unit_backward_ended(chunk, unit)
        return grad, None, None, None


@dataclass
class _Reducing:
    bucket: Bucket
    pending: Pending
    buffer: Tensor  # the full gradients; ZeRO-2 uses it again


@dataclass(frozen=True)
class Run:
    """Shard elements [start, stop) of a bucket that share one weight-decay rule."""

    bucket: Bucket
    owned: list[OwnedBlock]
    start: int
    stop: int


class ShardedDataParallel:
    """Owns the storage of this rank's parameters and runs the step described above.

    buckets     planned by `plan_buckets`; allocated here
    zero_stage  1 or 2
    Parameters hold zeros after construction: fill `Bucket.master` (or `parameters` through views)
    and call `gather_parameters`.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        groups: Groups,
        *,
        zero_stage: int,
        device: torch.device,
        dtype: torch.dtype,
        main_dtype: torch.dtype,
        span: Span = no_span,
    ) -> None:
        self.buckets = buckets
        self.groups = groups
        self.zero_stage = zero_stage
        self.main_dtype = main_dtype
        self.span = span
        self._last_micro_batch = False
        self._reducing: deque[_Reducing] = deque()
        self._gathering: dict[str, Pending] = {}
        self._full: dict[str, Tensor] = {}  # full gradient buffers by bucket, while they are needed
        self._free: list[Tensor] = []
        self._keeps_full = zero_stage == 1 or groups.data is None
        for bucket in buckets:
            bucket.allocate(device, dtype, main_dtype)
            if self._keeps_full:
                full = torch.zeros(bucket.num_elements, dtype=main_dtype, device=device)
                self._full[bucket.name] = full
                bucket.point_gradients_at(full)
                bucket.gradient = full[bucket.shard_start : bucket.shard_stop]
            else:
                bucket.gradient = torch.zeros(
                    bucket.shard_elements, dtype=main_dtype, device=device
                )
            for stored in bucket.stored:
                stored.parameter.register_post_accumulate_grad_hook(_add_to_main_gradient)
        self.runs = [run for bucket in buckets for run in _runs(bucket)]

    # ------------------------------------------------------------ optimizer's view

    def flats(self) -> list[Flat]:
        """Master and gradient shards as runs of equal weight decay, cut into named segments."""
        return [_flat(run) for run in self.runs]

    # ------------------------------------------------------------ backward

    def start_step(self) -> None:
        """Zero all gradients. Nothing may be in flight."""
        assert not self._reducing, "finish_gradients was not called for the step before"
        for full in self._full.values():
            full.zero_()
        if not self._keeps_full:
            for bucket in self.buckets:
                bucket.gradient.zero_()

    def backward_started(self, chunk: int, *, last_micro_batch: bool) -> None:
        """Before the backward of `chunk` for one micro-batch."""
        self._last_micro_batch = last_micro_batch
        if not self._keeps_full:
            last = max(b.last_unit for b in self.buckets if b.chunk == chunk)
            self._provide_buffers(chunk, last)

    def unit_backward_ended(self, chunk: int, unit: int) -> None:
        """Everything behind the input of `unit` has its gradients for this micro-batch."""
        for bucket in self._buckets_of(chunk):
            if bucket.first_unit == unit:
                self._reduce(bucket)
        if not self._keeps_full:
            self._provide_buffers(chunk, unit - 1)

    def backward_ended(self, chunk: int) -> None:
        """After the backward of `chunk`: what no boundary announced (its first unit) is ready."""
        for bucket in self._buckets_of(chunk):
            if bucket.first_unit == 0:
                self._reduce(bucket)

    def boundary(self, chunk: int, unit: int, x: Tensor) -> Tensor:
        """Called before each unit's forward: wait for its parameters, mark its backward."""
        for bucket in self._buckets_of(chunk):
            if bucket.first_unit <= unit:
                self._wait_for_parameters(bucket)
        if unit > 0 and x.requires_grad and torch.is_grad_enabled():
            x = _Boundary.apply(x, self, chunk, unit)
        return x

    def finish_gradients(self) -> None:
        """Wait for the reduce-scatters (on CUDA: the stream does); sum replicated and tied ones."""
        with self.span("grad_sync", op="finish"):
            while self._reducing:
                self._complete_oldest()
            self._sum_replicated()
            self._sum_tied()

    # ------------------------------------------------------------ parameters

    def gather_parameters(self) -> None:
        """Send every bucket's updated masters to all data ranks; returns before they arrive.

        What an earlier call sent arrives first: late values must not overwrite these.
        """
        self.wait_for_parameters()
        with self.span("param_gather", op="all_gather", group="data", stream="data"):
            for bucket in self.buckets:
                own = bucket.parameters[bucket.shard_start : bucket.shard_stop]
                if bucket.master.dtype != own.dtype:
                    own.copy_(bucket.master)
                if self.groups.data is not None:
                    self._gathering[bucket.name] = _gather_in_place(bucket, own, self.groups.data)

    def wait_for_parameters(self) -> None:
        """Every parameter is complete after this (on CUDA: for the current stream)."""
        for bucket in self.buckets:
            self._wait_for_parameters(bucket)

    # ------------------------------------------------------------ inside

    def _buckets_of(self, chunk: int) -> Iterator[Bucket]:
        return (bucket for bucket in self.buckets if bucket.chunk == chunk)

    def _wait_for_parameters(self, bucket: Bucket) -> None:
        pending = self._gathering.pop(bucket.name, None)
        if pending is not None:
            with self.span("param_gather", op="wait", bucket=bucket.name):
                pending.wait()

    def _provide_buffers(self, chunk: int, unit: int) -> None:
        """ZeRO-2: give the buckets whose backward begins with `unit` a zeroed gradient buffer."""
        for bucket in self._buckets_of(chunk):
            if bucket.last_unit == unit and bucket.name not in self._full:
                buffer = self._take_buffer()
                self._full[bucket.name] = buffer
                bucket.point_gradients_at(buffer)

    def _take_buffer(self) -> Tensor:
        """A zeroed buffer; at most two reductions stay in flight before one is waited for."""
        while len(self._reducing) >= 2:
            self._complete_oldest()
        if self._free:
            return self._free.pop().zero_()
        size = max(bucket.num_elements for bucket in self.buckets)
        device = self.buckets[0].parameters.device
        return torch.zeros(size, dtype=self.main_dtype, device=device)

    def _reduce(self, bucket: Bucket) -> None:
        if self.groups.data is None or (self.zero_stage == 1 and not self._last_micro_batch):
            return
        fields = {"op": "reduce_scatter", "group": "data", "stream": "data"}
        with self.span("grad_sync", bucket=bucket.name, **fields):
            buffer = self._full[bucket.name] if self._keeps_full else self._full.pop(bucket.name)
            pending = _reduce_in_place(bucket, buffer[: bucket.num_elements], self.groups.data)
            self._reducing.append(_Reducing(bucket, pending, buffer))

    def _complete_oldest(self) -> None:
        reducing = self._reducing.popleft()
        reduced = reducing.pending.wait()
        gradient = reducing.bucket.gradient
        if not self._keeps_full:
            gradient.add_(reduced)
            self._free.append(reducing.buffer)
        elif reduced.data_ptr() != gradient.data_ptr():
            gradient.copy_(reduced)

    def _sum_replicated(self) -> None:
        if self.groups.tensor is None:
            return
        runs = []
        for bucket in self.buckets:
            first, last = bucket.replicated_range()
            if first < last:
                runs.append(bucket.gradient[first:last])
        _sum_runs(runs, self.groups.tensor)

    def _sum_tied(self) -> None:
        if self.groups.embedding is not None:
            _sum_runs([b.gradient for b in self.buckets if b.tied], self.groups.embedding)


def _sum_runs(runs: list[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce several pieces as one message."""
    if not runs:
        return
    joined = torch.cat(runs)
    dist.all_reduce(joined, group=group)
    for run, part in zip(runs, joined.split([r.numel() for r in runs]), strict=True):
        run.copy_(part)


def _reduce_in_place(bucket: Bucket, full: Tensor, group: dist.ProcessGroup) -> Pending:
    """Reduce-scatter of a full gradient buffer; NCCL writes into the rank's own range."""
    own = full[bucket.shard_start : bucket.shard_stop]
    out = own if full.is_cuda else torch.empty_like(own)  # gloo cannot work in place
    return reduce_scatter_into(out, full, group)


def _gather_in_place(bucket: Bucket, own: Tensor, group: dist.ProcessGroup) -> Pending:
    source = own if own.is_cuda else own.clone()
    return all_gather_into(bucket.parameters, source, group)


def _add_to_main_gradient(parameter: nn.Parameter) -> None:
    """Ordinary autograd gradients (norms, embeddings) join the main gradient and are dropped.

    There is none where an operator has added to the main gradient itself.
    """
    if parameter.grad is None:
        return
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


def _runs(bucket: Bucket) -> list[Run]:
    owned = bucket.owned()
    halves = [[p for p in owned if p.flat.decay is decay] for decay in (True, False)]
    return [Run(bucket, half, *one_run(half)) for half in halves if half]


def _flat(run: Run) -> Flat:
    master, gradient = run.bucket.master, run.bucket.gradient
    segments = [
        Segment(
            name=piece.flat.block.name,
            master=master[piece.start : piece.stop],
            grad=gradient[piece.start : piece.stop],
            decay=piece.flat.decay,
            replicated=piece.flat.block.replicated,
            tied_copy=piece.flat.block.tied_copy,
        )
        for piece in run.owned
    ]
    decay = run.owned[0].flat.decay
    return Flat(master[run.start : run.stop], gradient[run.start : run.stop], decay, segments)
