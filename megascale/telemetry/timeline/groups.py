"""Which ranks a span's `group` means: the recorder writes "data", and every rank has its own.

`Groups.of(group, rank)` gives the members, in order of the axis; equal for all members, so the
first of them tells the instances of a group apart.
"""

from __future__ import annotations

from functools import lru_cache

from megascale.topology import Mesh

Members = tuple[int, ...]

_AXES = {"tensor": "tensor", "data": "data", "pipeline": "pipeline", "head": "pipeline"}


class Groups:
    """Members of the groups of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._world = tuple(range(mesh.world_size))
        self._axis = lru_cache(maxsize=None)(self._along)
        self._vocabulary: list[Members] | None = None

    def of(self, group: str, rank: int) -> Members | None:
        """Global ranks of the group called `group` that `rank` is in; None for a name that means
        nothing here."""
        if group == "world":
            return self._world
        if group in _AXES:
            return self._axis(_AXES[group], rank)
        if group == "vocabulary":
            if self._vocabulary is None:
                self._vocabulary = [tuple(ranks) for ranks in self.mesh.vocabulary_groups()]
            return self._vocabulary[self.mesh.coordinates(rank).dp_rank]
        return None

    def channel(self, group: str, rank: int) -> tuple[int, int] | None:
        """(source, destination) of a channel between stages, such as "0->1 activation"."""
        source, arrow, rest = group.partition("->")
        destination = rest.split(" ", 1)[0]
        if not (arrow and source.isdigit() and destination.isdigit()):
            return None
        stages = int(source), int(destination)
        if max(stages) >= self.mesh.pipeline:
            return None
        at = self.mesh.coordinates(rank)
        first, second = (
            self.mesh.global_rank(tp_rank=at.tp_rank, dp_rank=at.dp_rank, pp_rank=stage)
            for stage in stages
        )
        return first, second

    def _along(self, axis: str, rank: int) -> Members:
        mesh = self.mesh
        stride = {"tensor": 1, "data": mesh.tensor, "pipeline": mesh.tensor * mesh.data}[axis]
        degree: int = getattr(mesh, axis)
        first = rank - rank // stride % degree * stride
        return tuple(first + i * stride for i in range(degree))
