"""What the optimizer sees of buckets: runs of a shard that share one weight-decay rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megascale.optim import Flat, Segment
from megascale.parallel.buckets import Bucket, OwnedBlock, one_run


@dataclass(frozen=True)
class Run:
    """Shard elements [start, stop) of a bucket that share one weight-decay rule."""

    bucket: Bucket
    owned: list[OwnedBlock]
    start: int
    stop: int

    @property
    def has_replicated(self) -> bool:
        """Parts of it are the same on all tensor ranks, which sum their gradients."""
        return any(piece.flat.block.replicated for piece in self.owned)


def runs_of(bucket: Bucket) -> list[Run]:
    """The decayed run of this rank's range and the other one, where they have elements."""
    owned = bucket.owned()
    halves = [[p for p in owned if p.flat.decay is decay] for decay in (True, False)]
    return [Run(bucket, half, *one_run(half)) for half in halves if half]


def flat_of(run: Run) -> Flat:
    """A run's master, gradient and parameters, cut into named segments."""
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
    return Flat(
        master[run.start : run.stop],
        gradient[run.start : run.stop],
        run.owned[0].flat.decay,
        segments,
        parameters=_parameters(run),
    )


def _parameters(run: Run) -> Tensor | None:
    """None where the master is the parameters' own memory."""
    own = run.bucket.own_parameters
    return None if own.dtype == run.bucket.master.dtype else own[run.start : run.stop]
