"""Ranks, mesh axes and communication groups as pure data (MegaScale 2). No torch.

Rank order is tensor fastest, then data, then pipeline: a tensor-parallel group is a run of
neighbours (inside a node), and data-parallel groups come before pipeline groups, so that the
heavier data-parallel traffic crosses fewer switches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

AXES = ("tensor", "data", "pipeline")


@dataclass(frozen=True)
class Mesh:
    """The degrees of parallelism; every rank list and coordinate follows from them."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            assert degree >= 1, f"axis {axis} has degree {degree}; degrees are at least 1"

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.pipeline

    def coordinates(self, global_rank: int) -> Coordinates:
        assert 0 <= global_rank < self.world_size, (global_rank, self.world_size)
        tp_rank = global_rank % self.tensor
        dp_rank = global_rank // self.tensor % self.data
        pp_rank = global_rank // (self.tensor * self.data)
        return Coordinates(tp_rank=tp_rank, dp_rank=dp_rank, pp_rank=pp_rank)

    def global_rank(self, *, tp_rank: int, dp_rank: int, pp_rank: int) -> int:
        return tp_rank + self.tensor * (dp_rank + self.data * pp_rank)

    def groups(self, axis: str) -> list[list[int]]:
        """All groups along `axis` ("tensor", "data" or "pipeline"), each in order of the axis."""
        assert axis in AXES, f"axis is one of {AXES}, got {axis!r}"
        stride = {"tensor": 1, "data": self.tensor, "pipeline": self.tensor * self.data}[axis]
        degree = getattr(self, axis)
        firsts = [r for r in range(self.world_size) if r // stride % degree == 0]
        return [[first + i * stride for i in range(degree)] for first in firsts]

    def embedding_groups(self) -> list[list[int]]:
        """(first, last stage) pairs that keep tied embeddings equal; empty without pipeline."""
        if self.pipeline == 1:
            return []
        return [[ranks[0], ranks[-1]] for ranks in self.groups("pipeline")]

    def vocabulary_groups(self) -> list[list[int]]:
        """Ranks that hold the parts of a head shared over stages, a group a data rank; in order of
        stages, then of tensor ranks."""
        return [
            [
                self.global_rank(tp_rank=tp_rank, dp_rank=dp_rank, pp_rank=pp_rank)
                for pp_rank in range(self.pipeline)
                for tp_rank in range(self.tensor)
            ]
            for dp_rank in range(self.data)
        ]

    def edges(self) -> Iterator[tuple[int, int]]:
        """Directed (source, destination) neighbours of the pipeline ring, in one global order.

        Forward edges carry activations, the same pairs reversed carry gradients. The edge from the
        last stage back to the first exists for interleaved schedules.
        """
        for ranks in self.groups("pipeline"):
            for i, source in enumerate(ranks):
                destination = ranks[(i + 1) % len(ranks)]
                if source != destination:
                    yield source, destination


@dataclass(frozen=True)
class Coordinates:
    """Position of one rank on the mesh axes."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
