"""Parameters on their way from their owners to all data ranks.

A bucket's all-gather starts as soon as its masters are updated, in the order in which the next
forward needs the buckets, and is waited for by the first unit of the bucket there. So the gathers
run beside the rest of the optimizer (bound by memory, not by the links), the loading of data and
the first layers. On NCCL the owner's range is its own place in the result: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megascale.flux.collectives import Pending, all_gather_into
from megascale.parallel.buckets import Bucket
from megascale.parallel.spans import Span


class ParameterGathers:
    """At most one gather of each bucket is in flight."""

    def __init__(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup | None, span: Span
    ) -> None:
        self._buckets, self._group, self._span = buckets, group, span
        self._pending: dict[str, Pending] = {}

    def start(self, bucket: Bucket) -> None:
        """Send this rank's range of `bucket.parameters`; no gather of it may be in flight."""
        if self._group is None:
            return
        assert bucket.name not in self._pending, f"{bucket.name} is being gathered already"
        own = bucket.own_parameters
        fields = {"op": "all_gather", "group": "data", "stream": "data"}
        sent_bytes = own.nbytes * (self._group.size() - 1)
        with self._span("param_gather", bucket=bucket.name, num_bytes=sent_bytes, **fields):
            source = own if own.is_cuda else own.clone()
            self._pending[bucket.name] = all_gather_into(bucket.parameters, source, self._group)

    def wait(self, bucket: Bucket) -> None:
        """The bucket's parameters are complete after this (on CUDA: for the current stream)."""
        pending = self._pending.pop(bucket.name, None)
        if pending is not None:
            with self._span("param_gather", op="wait", bucket=bucket.name):
                pending.wait()

    def wait_for_all(self) -> None:
        for bucket in self._buckets:
            self.wait(bucket)
