"""Data-parallel communication of one stage, put between its computes (MegaScale 3.2).

As `parallel/zero.py`, `gradients.py` and `gathering.py` do it; a bucket is some layers of a chunk.

Gradients. ZeRO 0 and 1 reduce a bucket in the backward of its chunk's last micro-batch, as soon as
its first layer is through. ZeRO 2 and 3 reduce in every micro-batch, and at most MOST_REDUCING go
on while another bucket fills. Without overlap: after all of backward, and each at once waited for.

Parameters. A bucket's gather starts when the optimizer is through with it, while it goes on with
the next, in the order in which forward needs them; the first forward of its chunk waits for it.
Under ZeRO 3 parameters are gathered for each forward and each backward, one bucket ahead.

One stream a stage, in the order of its starts: what is needed first was started first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from megascale.plan.actions import INPUT_GRADIENTS, Action, ActionKind
from megascale.plan.prices import DataPrices
from megascale.plan.simulate.program import Label, StageProgram

MOST_REDUCING = 2
"""Reductions that go on while a bucket fills (`ShardedGradients._take_buffer`)."""

_Bucket = tuple[int, int]
"""Chunk, and place among the chunk's buckets in the order of forward."""


class Buckets:
    """Puts the computes of a stage in its program, with the communication that belongs to them.

    chunks  those of the stage, in the order of its first forwards
    """

    def __init__(
        self,
        program: StageProgram,
        prices: DataPrices,
        chunks: Iterable[int],
        *,
        zero_stage: int,
        overlaps_reduce: bool = True,
        overlaps_gather: bool = True,
    ) -> None:
        self._program, self._prices, self._chunks = program, prices, list(chunks)
        self._zero_stage = zero_stage
        self._overlaps_reduce, self._overlaps_gather = overlaps_reduce, overlaps_gather
        self._arriving: dict[_Bucket, int] = {}  # gathers that nobody has waited for
        self._reducing: deque[int] = deque()
        self._late: list[_Bucket] = []
        self._uses: deque[_Bucket] = deque()  # ZeRO 3: of parameters, from now on

    # ------------------------------------------------------------ between steps

    def update(self, seconds: float) -> None:
        """The optimizer, and the gathers that follow it."""
        label = self._program.label("optimizer")
        buckets = [(c, b) for c in self._chunks for b in range(len(self._gathers(c)))]
        if self._zero_stage == 3 or not buckets:
            self._program.compute(label, seconds)
            return
        layers = [self._prices.bucket_layers[c][-1 - b] for c, b in buckets]
        for bucket, share in zip(buckets, _shares(layers), strict=True):
            self._program.compute(label, seconds * share)
            if self._overlaps_gather:
                self._arriving[bucket] = self._gather(bucket)
        if not self._overlaps_gather:
            for item in [self._gather(bucket) for bucket in buckets]:
                self._program.wait_for(item)

    def expect(self, actions: Sequence[Action]) -> None:
        """ZeRO 3: what is going to be computed; the first gather starts."""
        if self._zero_stage == 3:
            self._uses.extend(self._used_by(actions))
            self._prefetch()

    def finish(self) -> None:
        """All of backward is through."""
        for bucket in self._late:
            self._reduce(bucket)
        self._late.clear()

    # ------------------------------------------------------------ computes

    def forward(self, label: int, chunk: int, seconds: float) -> None:
        self._compute(label, chunk, seconds, reads=self._is_missing(chunk), backward=False)

    def backward(self, label: int, chunk: int, seconds: float, *, last: bool) -> None:
        """Whole; `last` of the step for this chunk."""
        self._compute(
            label,
            chunk,
            seconds,
            reads=self._is_missing(chunk),
            reduces=last or self._zero_stage >= 2,
        )

    def backward_input(self, label: int, chunk: int, seconds: float) -> None:
        self._compute(label, chunk, seconds, reads=self._is_missing(chunk))

    def backward_weight(self, label: int, chunk: int, seconds: float, *, last: bool) -> None:
        self._compute(label, chunk, seconds, reduces=last or self._zero_stage >= 2)

    def _compute(
        self,
        label: int,
        chunk: int,
        seconds: float,
        *,
        backward: bool = True,
        reads: bool = False,
        reduces: bool = False,
    ) -> None:
        """Bucket by bucket, where parameters are waited for or gradients leave."""
        layers = self._prices.bucket_layers.get(chunk, ())  # in the order of backward
        if not layers or not (reads or reduces):
            self._program.compute(label, seconds)
            return
        last, shares = len(layers) - 1, _shares(layers)
        for place in range(len(layers)) if not backward else range(last, -1, -1):
            if reads:
                self._wait_for_parameters((chunk, place))
            if reduces and self._zero_stage >= 2:
                self._make_room()
            self._program.compute(label, seconds * shares[last - place])
            if reduces:
                self._filled((chunk, place))

    # ------------------------------------------------------------ gradients

    def _filled(self, bucket: _Bucket) -> None:
        chunk, _ = bucket
        if not self._prices.reduce_s.get(chunk):
            return
        if self._zero_stage >= 2:
            self._reducing.append(self._reduce(bucket))
            if not self._overlaps_reduce:
                self._program.wait_for(self._reducing.popleft())
        elif self._overlaps_reduce:
            self._reduce(bucket)
        else:
            self._late.append(bucket)

    def _make_room(self) -> None:
        while len(self._reducing) >= MOST_REDUCING:
            self._program.wait_for(self._reducing.popleft())

    def _reduce(self, bucket: _Bucket) -> int:
        chunk, place = bucket
        seconds = self._prices.reduce_s[chunk][-1 - place]
        return self._program.start(Label("grad_sync", chunk, None, f"bucket {place}"), seconds)

    # ------------------------------------------------------------ parameters

    def _gathers(self, chunk: int) -> tuple[float, ...]:
        return self._prices.gather_s.get(chunk, ())

    def _gather(self, bucket: _Bucket) -> int:
        chunk, place = bucket
        label = Label("param_gather", chunk, None, f"bucket {place}")
        return self._program.start(label, self._gathers(chunk)[place])

    def _is_missing(self, chunk: int) -> bool:
        """Whether parameters of `chunk` may not have arrived."""
        return bool(self._uses) or (chunk, 0) in self._arriving

    def _wait_for_parameters(self, bucket: _Bucket) -> None:
        if self._uses:
            used = self._uses.popleft()
            assert used == bucket, (used, bucket)
        item = self._arriving.pop(bucket, None)
        if item is None:
            return
        self._program.wait_for(item)
        if self._uses and self._uses[0] == bucket:
            self._arriving[bucket] = item  # it is used again at once, and stays
        else:
            self._prefetch()

    def _prefetch(self) -> None:
        if self._uses and self._gathers(self._uses[0][0]):
            self._arriving[self._uses[0]] = self._gather(self._uses[0])

    def _used_by(self, actions: Sequence[Action]) -> Iterator[_Bucket]:
        for action in actions:
            forward = action.kind is ActionKind.FORWARD or action.kind is ActionKind.HEAD
            if not forward and action.kind not in INPUT_GRADIENTS:
                continue
            places = range(len(self._prices.bucket_layers.get(action.chunk, ())))
            yield from ((action.chunk, p) for p in (places if forward else reversed(places)))


def _shares(layers: Sequence[float]) -> list[float]:
    """Of a compute, by bucket; equal ones where no bucket has layers."""
    total = sum(layers)
    return [x / total for x in layers] if total else [1.0 / len(layers)] * len(layers)
