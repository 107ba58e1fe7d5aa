"""Process groups of a mesh (MegaScale 3.5).

Groups are created in one global order (tensor, data, pipeline, embedding, head, vocabulary) and
each rank creates only the groups that it belongs to, with no barrier over all ranks a group: the
cost grows with the degree of the axes, not with the number of groups in the cluster. An axis of
degree 1 has no group (None) and no communication. The time of each creation is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megascale.parallel.spans import Span, no_span
from megascale.topology import Coordinates, Mesh

Group = dist.ProcessGroup | None


@dataclass
class Groups:
    """This rank's place and its group along each axis."""

    mesh: Mesh
    coordinates: Coordinates
    tensor: Group = None
    data: Group = None
    pipeline: Group = None
    embedding: Group = None  # first and last stage, where embeddings are tied
    head: Group = None  # as `pipeline`, for hidden states and gradients of a shared head
    vocabulary: Group = None  # all stages and tensor ranks, for its softmax
    creation_s: dict[str, float] = field(default_factory=dict)

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp_rank == self.mesh.pipeline - 1


def create_groups(
    mesh: Mesh, *, tied_embeddings: bool, timeout_s: float, shared_head: bool = False
) -> Groups:
    """This rank's groups; the default group must be initialised where the world is above 1."""
    global_rank = dist.get_rank() if dist.is_initialized() else 0
    groups = Groups(mesh, mesh.coordinates(global_rank))
    wanted: list[tuple[str, list[list[int]]]] = [
        (axis, mesh.groups(axis)) for axis in ("tensor", "data", "pipeline")
    ]
    if tied_embeddings:
        wanted.append(("embedding", mesh.embedding_groups()))
    if shared_head:
        wanted += [("head", mesh.groups("pipeline")), ("vocabulary", mesh.vocabulary_groups())]
    for name, members in wanted:
        own = next((ranks for ranks in members if global_rank in ranks), None)
        if own is None or len(own) == 1:
            continue
        start = time.monotonic()
        timeout = timedelta(seconds=timeout_s)
        group = dist.new_group(
            own,
            timeout=timeout,
            use_local_synchronization=True,
            pg_options=_in_front(timeout) if name == "data" and _uses_nccl() else None,
        )
        groups.creation_s[name] = time.monotonic() - start
        setattr(groups, name, group)
    return groups


def _uses_nccl() -> bool:
    return dist.is_nccl_available() and "nccl" in str(dist.get_backend_config())


def _in_front(timeout: timedelta) -> dist.ProcessGroupNCCL.Options:
    """NCCL on a stream of high priority, for what runs under backward: its few thread blocks take
    the next free places, where on an ordinary stream they wait until all blocks of the GEMMs that
    were launched before have begun. So a reduce-scatter starts, and goes on, while its bucket's
    successor is computed, and does not pile up at the end of the step. It takes the same SMs from
    the GEMMs in either case."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def summer(group: Group, name: str, span: Span = no_span) -> Callable[[Tensor], Tensor]:
    """A function that sums a small tensor over `group` in place; the identity for None. It is a
    span, `norm_sum` of the group's `name`, for who asks where a rank waits."""

    def sum_over_group(values: Tensor) -> Tensor:
        if group is not None:
            with span("norm_sum", op=name):
                dist.all_reduce(values, group=group)
        return values

    return sum_over_group
