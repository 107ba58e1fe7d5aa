"""NCCL through a Redis server: the same sums, and a process that ends with its own exit code while
NCCL's threads still ask a store of Python."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megascale.config import CommConfig
from megascale.env import child_environment
from megascale.parallel.groups import create_groups
from megascale.parallel.world import initialise_world
from megascale.topology import Mesh
from tests.distributed import run_ranks
from tests.telemetry.path.servers import BINARY, RedisServer

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(BINARY is None, reason="redis-server is not installed"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


def _sums(rank: int, world_size: int, port: int) -> list[float]:
    dist.destroy_process_group()
    comm = CommConfig(init_store="redis", redis_address=f"redis://127.0.0.1:{port}/0")
    device = torch.device("cuda", rank)
    initialise_world(
        comm, rank=rank, world_size=world_size, device=device, init_method="", start="gpus"
    )
    groups = create_groups(Mesh(tensor=world_size), tied_embeddings=False, timeout_s=60.0)
    sums = []
    for group in (dist.group.WORLD, groups.tensor):
        value = torch.tensor(1.0 + rank, device=device)
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    return sums


def test_sums(server: RedisServer) -> None:
    assert run_ranks(_sums, 2, server.port, cuda=True) == [[3.0, 3.0], [3.0, 3.0]]


PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from megascale.config import CommConfig
from megascale.parallel.world import initialise_world

rank, address, start = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
comm = CommConfig(init_store="redis", redis_address=address)
initialise_world(comm, rank=rank, world_size=2, device=device, init_method="", start=start)
value = torch.ones(1, device=device)
dist.all_reduce(value)
torch.cuda.synchronize()
time.sleep(3.0)  # NCCL's threads have asked the store by now
sys.exit(7)
"""


def test_a_process_that_ends_without_leaving_keeps_its_exit_code(server: RedisServer) -> None:
    address, start = f"redis://127.0.0.1:{server.port}/0", uuid.uuid4().hex
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), address, start],
            env=child_environment({}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=90)
            assert rank.returncode == 7, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
