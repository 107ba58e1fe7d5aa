"""Ranks that join through a Redis server: the same groups and sums as through TCPStore, and an
error on every rank where the server dies before they have joined."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megascale.config import CommConfig
from megascale.env import free_port
from megascale.errors import LaunchError
from megascale.parallel import redis_connection, world
from megascale.parallel.groups import create_groups
from megascale.parallel.world import initialise_world, leave_world
from megascale.topology import Mesh
from tests.distributed import run_ranks
from tests.telemetry.path.servers import BINARY, RedisServer

CPU = torch.device("cpu")
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


def redis_comm(port: int, **more: float) -> CommConfig:
    address = f"redis://127.0.0.1:{port}/0"
    return CommConfig(init_store="redis", redis_address=address, **more)


def _sums(
    rank: int, world_size: int, comm: CommConfig, ports: tuple[int, int], lazy_ranks: int = 256
) -> tuple[list[float], list[str]]:
    """Of the rank's number over each of its groups, in two starts after each other."""
    dist.destroy_process_group()
    world.LAZY_RANKS = lazy_ranks
    for start, port in zip(("first", "second"), ports, strict=True):
        initialise_world(
            comm,
            rank=rank,
            world_size=world_size,
            device=CPU,
            init_method=f"tcp://127.0.0.1:{port}",
            start=start,
        )
        mesh = Mesh(tensor=2, data=2, pipeline=2)
        groups = create_groups(mesh, tied_embeddings=True, timeout_s=30.0, shared_head=True)
        sums = []
        for group in (groups.tensor, groups.data, groups.pipeline, groups.vocabulary):
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=group)
            sums.append(float(value))
        if start == "first":
            dist.barrier()
            leave_world()
    return sums, sorted(groups.creation_s)


@needs_redis
def test_groups_through_redis_are_those_through_tcp(server: RedisServer) -> None:
    redis = run_ranks(_sums, 8, redis_comm(server.port), (0, 0))
    tcp = run_ranks(_sums, 8, CommConfig(), (free_port(), free_port()))
    assert redis == tcp
    assert redis[3][0] == [2 + 3, 1 + 3, 3 + 7, 2 + 3 + 6 + 7]
    assert redis[0][1] == ["data", "embedding", "head", "pipeline", "tensor", "vocabulary"]


@needs_redis
def test_groups_that_connect_when_they_are_used(server: RedisServer) -> None:
    """As from LAZY_RANKS ranks on."""
    sums = [told[0] for told in run_ranks(_sums, 8, redis_comm(server.port), (0, 0), 8)]
    assert sums[3] == [2 + 3, 1 + 3, 3 + 7, 2 + 3 + 6 + 7]
    assert sums[4] == [4 + 5, 4 + 6, 0 + 4, 0 + 1 + 4 + 5]


def _is_lazy(rank: int, world_size: int, port: int, start: str, lazy_ranks: int) -> bool:
    dist.destroy_process_group()
    world.LAZY_RANKS = lazy_ranks
    initialise_world(
        redis_comm(port), rank=rank, world_size=world_size, device=CPU, init_method="", start=start
    )
    return os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"


@needs_redis
def test_only_large_worlds_connect_lazily(server: RedisServer) -> None:
    assert run_ranks(_is_lazy, 2, server.port, "large", 2) == [True, True]
    assert run_ranks(_is_lazy, 2, server.port, "small", 3) == [False, False]


def _join(rank: int, world_size: int, port: int, server_pid: int) -> tuple[str, float]:
    """The last rank kills the server in place of joining; what the others are told, and when."""
    redis_connection.RECONNECT_S = 0.5
    dist.destroy_process_group()
    start_s = time.monotonic()
    told = "joined"
    if rank == world_size - 1:
        time.sleep(0.5)
        os.kill(server_pid, signal.SIGKILL)
    else:
        try:
            initialise_world(
                redis_comm(port, init_timeout_s=60.0),
                rank=rank,
                world_size=world_size,
                device=CPU,
                init_method="",
                start="start",
            )
        except LaunchError as error:
            told = str(error)
    took_s = time.monotonic() - start_s
    dist.init_process_group("fake", rank=rank, world_size=world_size)  # for the harness
    return told, took_s


@needs_redis
def test_a_server_that_dies_while_ranks_join(server: RedisServer) -> None:
    *others, _ = run_ranks(_join, 3, server.port, server.pid)
    for told, took_s in others:
        assert f"could not join the process group at redis://127.0.0.1:{server.port}/0" in told
        assert "tried for" in told
        assert took_s < 5.0


def test_a_launcher_that_names_no_start_is_refused_before_anything_is_waited_for() -> None:
    with pytest.raises(LaunchError, match=r"set MEGASCALE_START to a new word.*--rdzv-id"):
        initialise_world(redis_comm(1), rank=0, world_size=2, device=CPU, init_method="")


def test_torch_still_has_what_ends_its_groups_with_the_process() -> None:
    assert callable(dist.distributed_c10d._abort_process_group)
