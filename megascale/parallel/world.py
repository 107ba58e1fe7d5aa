"""The default process group: joining it through a store, and leaving it (MegaScale 3.5).

The store is torch's TCPStore in rank 0, or a Redis server beside all ranks (`redis_store.py`).
Joining may take `comm.init_timeout_s`; every collective after it, `comm.timeout_s`. The group is
not bound to the device: NCCL would then split every new group from it, which all ranks must join,
and here each rank creates only its own groups (`groups.py`).

From LAZY_RANKS ranks on gloo connects two ranks when they first speak to each other. By default it
connects all pairs of a group when that is created: n^2 look-ups in the store and n sockets in each
of n processes, for groups of all ranks that use a few of them (checkpoints have two such groups).
Below, everything is connected before training, and no rank looks anything up that late.
"""

from __future__ import annotations

import atexit
import logging
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from megascale.config import CommConfig
from megascale.env import START, connect_gloo_lazily
from megascale.errors import LaunchError
from megascale.parallel.redis_store import RedisStore

LAZY_RANKS = 256
_log = logging.getLogger(__name__)
_world_store: RedisStore | None = None


def initialise_world(
    comm: CommConfig,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    init_method: str,
    start: str | None = None,
) -> None:
    """Join the default process group. Raises LaunchError naming the address when peers are late.

    init_method  where the ranks meet with `comm.init_store` "tcp": tcp://HOST:PORT
    start        `RankEnvironment.start`, which "redis" needs
    """
    backend = comm.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if world_size >= LAZY_RANKS:
        connect_gloo_lazily()
    redis = comm.init_store == "redis"
    where = comm.redis_server if redis else init_method
    try:
        if redis:
            store: dist.Store = _open_redis(comm, rank, world_size, start)
        else:
            store = _open_tcp(comm, rank, world_size, init_method)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("world", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=comm.timeout_s),
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        _close_store()
        hint = "the server lives" if redis else "the address and port are free and reachable"
        raise LaunchError(
            f"rank {rank} of {world_size} could not join the process group at {where} "
            f"({backend}): {error}; check that all ranks start and that {hint}"
        ) from error
    if redis and device.type == "cuda":
        atexit.register(_abort)


def leave_world() -> None:
    """Destroy the process groups, then close the store."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _close_store()


def _open_tcp(comm: CommConfig, rank: int, world_size: int, init_method: str) -> dist.Store:
    timeout = timedelta(seconds=comm.init_timeout_s)
    found = dist.rendezvous(init_method, rank=rank, world_size=world_size, timeout=timeout)
    store, _, _ = next(found)
    store.set_timeout(timeout)
    return store


def _open_redis(comm: CommConfig, rank: int, world_size: int, start: str | None) -> RedisStore:
    global _world_store
    if start is None:
        raise LaunchError(
            f"comm.init_store is redis, and nothing tells this start of rank {rank} from an "
            f"earlier one at {comm.redis_server}: set {START} to a new word, the same on every "
            "rank (torchrun does it with --rdzv-id)"
        )
    _world_store = RedisStore.open(
        comm.redis_address,
        start,
        rank=rank,
        world_size=world_size,
        timeout_s=comm.init_timeout_s,
    )
    return _world_store


def _close_store() -> None:
    global _world_store
    store, _world_store = _world_store, None
    if store is not None:
        try:
            store.close()
        except dist.DistStoreError as error:  # its keys go with their lifetime
            _log.warning("%s", error)


def _abort() -> None:
    """At the end of a process whose groups were not destroyed: NCCL's threads ask the store once a
    second, and a store of Python cannot answer while the interpreter goes."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()
