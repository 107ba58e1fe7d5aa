"""All-to-all between the devices of a node (MegaScale 4.3), one process each: bandwidth, and every
value where it belongs.

NCCL on GPUs, gloo over loopback between two processes on a CPU. A number here is what one rank
sends to the others over the slowest rank's median time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WARM_UP, ROUNDS = 3, 10


def run(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """The rate as this rank saw it.

    arguments  rank, world_size, port, device ("cpu" or "cuda"), megabytes (a rank sends), timeout_s
    Raises ValueError for a value that came wrong.
    """
    rank, world_size = int(arguments["rank"]), int(arguments["world_size"])
    on_cuda = arguments["device"] == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    tell("the meeting of the ranks")
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"tcp://127.0.0.1:{arguments['port']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=float(arguments["timeout_s"])),
    )
    try:
        tell("the all-to-all")
        each = int(arguments["megabytes"]) * 1_000_000 // 4 // world_size
        seconds = _exchange(rank, world_size, each, device)
    finally:
        tell("the ranks' parting")
        dist.destroy_process_group()
    kind = torch.cuda.get_device_name(device) if on_cuda else "cpu processes"
    sent = (world_size - 1) * each * 4
    rate = {
        "at": f"rank {rank}",
        "class": "all_to_all_gb_s",
        "kind": f"{world_size} x {kind}",
        "value": sent / seconds / 1e9,
    }
    return {"rates": [rate], "unit": "GB/s"}


def _exchange(rank: int, world_size: int, each: int, device: torch.device) -> float:
    """Seconds of one all-to-all: the median here, then the maximum over ranks."""
    sent = torch.cat([_piece(rank, to, each, device) for to in range(world_size)])
    expected = torch.cat([_piece(source, rank, each, device) for source in range(world_size)])
    times = []
    for number in range(WARM_UP + ROUNDS):
        got = torch.full_like(sent, -1)
        dist.barrier()
        _finish(device)
        start = time.monotonic()
        dist.all_to_all_single(got, sent)
        _finish(device)
        if number >= WARM_UP:
            times.append(time.monotonic() - start)
        if not torch.equal(got, expected):
            wrong = int((got != expected).nonzero()[0])
            raise ValueError(f"rank {rank} got a wrong value from rank {wrong // each}")
    slowest = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _piece(source: int, target: int, each: int, device: torch.device) -> Tensor:
    """What `source` sends to `target`: known to both, different for every pair and place."""
    places = torch.arange(each, dtype=torch.int32, device=device)
    return places * 31 + (source * 4099 + target * 65_537)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
