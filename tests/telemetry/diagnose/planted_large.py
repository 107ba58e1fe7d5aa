"""A planted hang of a small job with many replicas more, which do what a healthy one does.

Simulating 12,288 ranks takes seconds; 256 and copies of one replica take a tenth of it, and
who is asked about the hang sees as many ranks. The whole simulation is left to the slow tests.
"""

from __future__ import annotations

from dataclasses import replace

from megascale.telemetry.diagnose.hang import mesh_groups
from megascale.topology import Mesh
from tests.telemetry.diagnose.planted import Hang, Layout

MEDIUM = Layout(Mesh(8, 4, 8), micro_batches=8, tensor_ops=1)
NUM_REPLICAS = 192  # of MEDIUM's shape: 12,288 ranks


def models(hang: Hang, mesh: Mesh) -> list[int]:
    """The rank of `hang` that each rank of `mesh` does as."""
    small = hang.layout.mesh
    faulty = {small.coordinates(rank).dp_rank for rank in hang.guilty}
    healthy = next(dp_rank for dp_rank in range(small.data) if dp_rank not in faulty)
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    return [
        small.global_rank(
            tp_rank=at.tp_rank,
            dp_rank=at.dp_rank if at.dp_rank < small.data else healthy,
            pp_rank=at.pp_rank,
        )
        for at in places
    ]


def guilty_in(hang: Hang, mesh: Mesh) -> tuple[int, ...]:
    places = [hang.layout.mesh.coordinates(rank) for rank in hang.guilty]
    return tuple(
        mesh.global_rank(tp_rank=at.tp_rank, dp_rank=at.dp_rank, pp_rank=at.pp_rank)
        for at in places
    )


def enlarged(hang: Hang, num_replicas: int = NUM_REPLICAS) -> Hang:
    """The same hang among more replicas, as the driver sees it."""
    mesh = replace(hang.layout.mesh, data=num_replicas)
    model = models(hang, mesh)
    return replace(
        hang,
        layout=replace(hang.layout, mesh=mesh),
        guilty=guilty_in(hang, mesh),
        views={rank: hang.views[of] for rank, of in enumerate(model) if of in hang.views},
        blocked={rank: hang.blocked[of] for rank, of in enumerate(model)},
        posted={rank: hang.posted[of] for rank, of in enumerate(model)},
        groups=mesh_groups(mesh),
    )
