"""One rank of a calibration: measures its device, and with its peers the links between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megascale.env import RankEnvironment, installed_versions
from megascale.plan.machine.samples import Samples
from megascale.plan.work.operations import Direction, Gemm
from megascale.train.calibrate import compute, links
from megascale.train.calibrate.grid import Grid

TIMEOUT = timedelta(seconds=120)  # of a collective
SHARE_OF_GEMMS = 0.7  # of the budget; attention has what is then left
SUSTAINED = Gemm("sustained", 8192, 12288, 12288, Direction.FORWARD)


@dataclass
class Budget:
    """Seconds that may pass before no more samples begin; the same decision on every rank."""

    seconds: float
    group: dist.ProcessGroup | None
    device: torch.device

    def __post_init__(self) -> None:
        self._begin = time.monotonic()

    def within(self, share: float) -> Callable[[], bool]:
        """Whether `share` of the budget is not spent yet."""
        return lambda: time.monotonic() - self._begin < share * self.seconds


def measure(grid: Grid, budget: Budget, say: Callable[[str], None]) -> Samples:
    """Everything that this device, and its peers if there are any, can show."""
    device, group = budget.device, budget.group
    say("memory passes, launches, host copies")
    launch_s = compute.measure_launch(device)
    watch = compute.Stopwatch(device)
    passes = compute.measure_passes(grid.pass_bytes, watch)
    host = links.measure_host(grid.transfer_bytes, device)
    collectives = []
    if group is not None:
        say(f"collectives of {group.size()} ranks")
        collectives = links.measure_collectives(grid.transfer_bytes, group, device)
        collectives += links.measure_copy_engines(grid.transfer_bytes, group, device)
    say("transfers beside products")
    overlap = links.measure_overlap(group, device)
    say("matrix products")
    on_cuda = device.type == "cuda"
    sustained = compute.measure_sustained(SUSTAINED, watch) if on_cuda else None
    gemms = compute.measure_gemms(grid.gemms(), watch, budget.within(SHARE_OF_GEMMS))
    say("attention")
    attentions = compute.measure_attentions(grid.attentions(), watch, budget.within(1.0))
    return Samples(
        device=torch.cuda.get_device_name(device) if on_cuda else "cpu",
        versions=installed_versions(("torch", "triton")),
        gemm=tuple(gemms),
        attention=tuple(attentions),
        memory=tuple(passes),
        collective=(*collectives, *host),
        overlap=tuple(overlap),
        launch_s=launch_s,
        sustained=sustained,
    )


def join(place: RankEnvironment) -> tuple[dist.ProcessGroup | None, torch.device]:
    """This rank's device, and the group of all where there are several."""
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", place.local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    if place.world_size == 1:
        return None, device
    host, port = place.rendezvous
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=place.global_rank,
        world_size=place.world_size,
        timeout=TIMEOUT,
        device_id=device if on_cuda else None,
    )
    return dist.group.WORLD, device
