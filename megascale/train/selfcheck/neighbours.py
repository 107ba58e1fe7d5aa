"""All-reduce between two nodes (MegaScale 4.3: neighbours under one switch), one process on each.

gloo over TCP between two addresses, so that it runs on every node; it proves the path, its
bandwidth and that sums are right. The network of the GPUs is `rdma`'s and NCCL's matter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WARM_UP, ROUNDS = 2, 5


def run(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """GB/s that each end sent and received.

    arguments  host, port: of rank 0; rank: 0 listens there, 1 comes to it; megabytes; timeout_s:
               how long one waits for the other
    Raises ValueError for a wrong sum.
    """
    rank = int(arguments["rank"])
    place = f"{arguments['host']}:{arguments['port']}"
    tell(f"the meeting at {place}")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=float(arguments["timeout_s"])),
    )
    try:
        tell(f"the all-reduce through {place}")
        seconds = _reduce(rank, int(arguments["megabytes"]) * 1_000_000 // 4)
    finally:
        dist.destroy_process_group()
    # of two ranks' ring all-reduce each sends the buffer once
    return {"gb_s": int(arguments["megabytes"]) / 1e3 / seconds}


def _reduce(rank: int, count: int) -> float:
    """Median seconds of one all-reduce. Whole numbers, so that the sum is exact."""
    places = torch.arange(count, dtype=torch.int32) % 100_003
    expected = places * 5
    times = []
    for number in range(WARM_UP + ROUNDS):
        values = places * (2 + rank)
        dist.barrier()
        start = time.monotonic()
        dist.all_reduce(values)
        if number >= WARM_UP:
            times.append(time.monotonic() - start)
        if not torch.equal(values, expected):
            raise ValueError("the sum over the two nodes is wrong")
    return statistics.median(times)
