"""Sharded data parallelism, ZeRO-1 and ZeRO-2, with its communication overlapped (MegaScale 3.2).

Every data rank owns one range of each bucket: its fp32 master, its optimizer state, its reduced
gradient. A step is
    start_step, backward of all micro-batches, finish_gradients, the optimizer's step with
    `flat_updated` for each flat, finish_update
and the communication hides like this:
* a bucket's reduce-scatter starts when the backward of its first unit has ended, while backward
  goes on below it. ZeRO-1 does so in the last micro-batch only; ZeRO-2 in every one
  (`gradients.py`). What is reduced goes to the norm while the last reduce-scatters still run.
* a bucket's all-gather starts as soon as its masters are updated, while the optimizer goes on, and
  is waited for by the first unit of the bucket in the next forward (`gathering.py`).

The order of events inside one chunk's backward is known from boundaries: an identity operator in
front of each unit whose backward runs when everything behind it has its gradients. Where weight
gradients are deferred (`ops/deferred.py`), gradients are added and boundaries tell of their unit
only when the deferred work runs: `backward_started` is called before that, not before the backward
that defers.

Gradients are SUMMED over data ranks: the loss is scaled by the global token count, so no mean of
means appears. Parameters replicated over tensor ranks have partial gradients: they are summed over
that group after the reduce-scatter, on the shard alone, where they are 1 / data the size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.optim import Flat
from megascale.parallel.backward_hooks import boundary, watch
from megascale.parallel.buckets import Bucket
from megascale.parallel.gathering import ParameterGathers
from megascale.parallel.gradients import FullGradients, Gradients, ShardedGradients
from megascale.parallel.groups import Groups
from megascale.parallel.reduce_scatter import InBfloat16, InMainDtype, Reduction
from megascale.parallel.runs import Run, flat_of, runs_of
from megascale.parallel.spans import Span, no_span

OnFlat = Callable[[int], object]


def _ignore(_flat: int) -> None:
    pass


class ShardedDataParallel:
    """Owns the storage of this rank's parameters and runs the step described above.

    buckets               planned by `plan_buckets`; allocated here
    zero_stage            1 or 2
    overlap_grad_reduce   reduce-scatters under backward, or after it
    overlap_param_gather  all-gathers under the optimizer and the next forward, or between them
    reduce_in_bfloat16    gradients travel in bf16 and are summed in the main dtype
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
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        reduce_in_bfloat16: bool = False,
        span: Span = no_span,
    ) -> None:
        self.buckets = buckets
        self.groups = groups
        self.overlap_param_gather = overlap_param_gather
        self.span = span
        for bucket in buckets:
            bucket.allocate(device, dtype, main_dtype)
            for stored in bucket.stored:
                watch(stored.parameter)
        reduction: Reduction = InBfloat16(device) if reduce_in_bfloat16 else InMainDtype()
        self._gradients: Gradients
        if zero_stage == 1 or groups.data is None:
            self._gradients = FullGradients(
                buckets,
                groups.data,
                reduction,
                main_dtype=main_dtype,
                overlap=overlap_grad_reduce,
                span=span,
            )
        else:
            self._gradients = ShardedGradients(
                buckets,
                groups.data,
                reduction,
                main_dtype=main_dtype,
                overlap=overlap_grad_reduce,
                span=span,
            )
        self._gathers = ParameterGathers(buckets, groups.data, span)
        runs = [runs_of(bucket) for bucket in buckets]
        self.runs = [run for of_bucket in runs for run in of_bucket]
        self._flats_of: dict[str, list[int]] = {bucket.name: [] for bucket in buckets}
        for number, run in enumerate(self.runs):
            self._flats_of[run.bucket.name].append(number)

    # ------------------------------------------------------------ optimizer's view

    def flats(self) -> list[Flat]:
        """Master and gradient shards as runs of equal weight decay, cut into named segments, in the
        order in which forward needs their buckets."""
        return [flat_of(run) for run in self.runs]

    # ------------------------------------------------------------ backward

    def start_step(self) -> None:
        """Forget all gradients, also those of a step that failed on its way."""
        self._gradients.start_step()

    def backward_started(self, chunk: int, *, last_micro_batch: bool) -> None:
        """Before weight gradients of `chunk` are computed, for one micro-batch or several."""
        self._gradients.backward_started(chunk, last_micro_batch=last_micro_batch)

    def backward_ended(self, chunk: int) -> None:
        """After them: what no boundary announced (its first unit) is ready."""
        self._gradients.unit_ended(chunk, 0)

    def boundary(self, chunk: int, unit: int, x: Tensor) -> Tensor:
        """Called before each unit's forward: wait for its parameters, mark its backward."""
        for bucket in self.buckets:
            if bucket.chunk == chunk and bucket.first_unit <= unit:
                self._gathers.wait(bucket)
        if unit > 0 and x.requires_grad and torch.is_grad_enabled():
            x = boundary(x, lambda: self._gradients.unit_ended(chunk, unit))
        return x

    def finish_gradients(self, final: OnFlat = _ignore) -> None:
        """Wait for the reduce-scatters (on CUDA: the stream does); sum replicated and tied ones.
        Parameters that no unit waited for are waited for too: an update may write them now.

        final  called once with the number of each flat, when its gradient will not change any more:
               most while other buckets are still being reduced
        """
        later: list[int] = []

        def reduced(bucket: Bucket) -> None:
            for number in self._flats_of[bucket.name]:
                if self._is_summed_later(self.runs[number]):
                    later.append(number)
                else:
                    final(number)

        with self.span("grad_sync", op="finish"):
            self._gradients.finish(reduced)
            self._sum_replicated()
            self._sum_tied()
            for number in later:
                final(number)
        self.wait_for_parameters()

    # ------------------------------------------------------------ parameters

    def flat_updated(self, flat: int) -> None:
        """The optimizer has the master and the parameters of flat number `flat` ready; it goes
        through the flats in order."""
        bucket = self.runs[flat].bucket
        if self.overlap_param_gather and flat == self._flats_of[bucket.name][-1]:
            self._gathers.start(bucket)

    def finish_update(self) -> None:
        """All flats are updated. Parameters are under way, or with the overlap off, complete."""
        if not self.overlap_param_gather:
            for bucket in self.buckets:
                self._gathers.start(bucket)
            self.wait_for_parameters()

    def gather_parameters(self) -> None:
        """Send every bucket's masters to all data ranks; returns before they arrive.

        What was sent earlier arrives first: late values must not overwrite these.
        """
        self.wait_for_parameters()
        for bucket in self.buckets:
            own = bucket.own_parameters
            if bucket.master.dtype != own.dtype:
                own.copy_(bucket.master)
            self._gathers.start(bucket)

    def wait_for_parameters(self) -> None:
        """Every parameter is complete after this (on CUDA: for the current stream)."""
        self._gathers.wait_for_all()

    # ------------------------------------------------------------ inside

    def _is_summed_later(self, run: Run) -> bool:
        over_tensor = self.groups.tensor is not None and run.has_replicated
        return over_tensor or (self.groups.embedding is not None and run.bucket.tied)

    def _sum_replicated(self) -> None:
        if self.groups.tensor is None:
            return
        runs = []
        for bucket in self.buckets:
            first, last = bucket.replicated_range()
            if first < last:
                runs.append(bucket.gradient[first:last])
        with self.span("tp_all_reduce", op="all_reduce", group="tensor", work="tp"):
            _sum_runs(runs, self.groups.tensor)

    def _sum_tied(self) -> None:
        if self.groups.embedding is not None:
            with self.span("tied_sum"):
                _sum_runs([b.gradient for b in self.buckets if b.tied], self.groups.embedding)


def _sum_runs(runs: list[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce several pieces as one message."""
    if not runs:
        return
    joined = torch.cat(runs)
    dist.all_reduce(joined, group=group)
    for run, part in zip(runs, joined.split([r.numel() for r in runs]), strict=True):
        run.copy_(part)
