"""Groups of all ranks on the CPU, over which saves are agreed on; tensors never travel there.

Every thread that talks to other ranks has a group of its own, since two threads on one group would
take each other's messages. Whoever has written its file waits behind training for the slowest,
which is no fault, so those groups' deadline is long: a rank that is gone breaks the connection at
once, one that stands still stops training, and a storage that does is told by its writer. Copies
between memories wait for no storage: theirs is the deadline of every collective.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megascale.train.assemble import Assembly

_BEHIND = timedelta(days=1)


def control_group(assembly: Assembly) -> dist.ProcessGroup | None:
    """For plans, hashes and agreements of the loop itself."""
    if assembly.mesh.world_size == 1:
        return None
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    return _group_of_a_collective(assembly)


def group_for_copies(assembly: Assembly) -> dist.ProcessGroup | None:
    """For the thread that sends memory slots to partners. Collective."""
    return None if assembly.mesh.world_size == 1 else _group_of_a_collective(assembly)


def group_behind(assembly: Assembly) -> dist.ProcessGroup | None:
    """Another one with each call, for one thread behind training. Collective."""
    if assembly.mesh.world_size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=_BEHIND)


def _group_of_a_collective(assembly: Assembly) -> dist.ProcessGroup:
    timeout = timedelta(seconds=assembly.config.comm.timeout_s)
    return dist.new_group(backend="gloo", timeout=timeout)
