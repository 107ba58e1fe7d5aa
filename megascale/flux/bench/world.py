"""The ranks of a bench run: devices, the one process group, symmetric memory where there is any."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megascale.env import RankEnvironment
from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS, NUM_SLOTS, Arena
from megascale.flux.default_rule import Mode
from megascale.flux.forms import forms, missing, on_request
from megascale.flux.machine import why_not_fused
from megascale.flux.ranks import GroupOnly
from megascale.flux.timing import EagerTimer, GraphTimer, HostTimer, Timer

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=90)  # of a collective: a rank that hangs ends the run


@dataclass
class World:
    """What a rank needs of the others. `arena` is a GroupOnly where "nccl" alone can run."""

    rank: int
    device: torch.device
    group: dist.ProcessGroup
    arena: Arena | GroupOnly

    @classmethod
    def join(cls, place: RankEnvironment) -> World:
        """Meet the other ranks. Raises FluxError where there are fewer GPUs than ranks."""
        on_cuda = torch.cuda.is_available()
        if on_cuda and place.local_rank >= torch.cuda.device_count():
            raise FluxError(
                f"--nproc asks for {place.local_world_size} ranks here and there are "
                f"{torch.cuda.device_count()} GPUs; start at most as many"
            )
        device = torch.device("cuda", place.local_rank) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(device)
        host, port = place.rendezvous
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=place.global_rank,
            world_size=place.world_size,
            timeout=TIMEOUT,
            device_id=device if on_cuda else None,
        )
        group = dist.group.WORLD
        assert group is not None
        obstacle = why_not_fused(group, device)
        if obstacle and place.global_rank == 0:
            logger.warning("only the reference form is measured: %s", obstacle)
        arena = GroupOnly(group, device) if obstacle else Arena.of(group, device)
        return cls(place.global_rank, device, group, arena)

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def capability(self) -> tuple[int, int]:
        """(0, 0) on a CPU."""
        return torch.cuda.get_device_capability(self.device) if self.on_cuda else (0, 0)

    def offered(self, op: str, asked: Sequence[str] = ()) -> list[str]:
        """Names of the forms that can run here; of those on request what is `asked` for."""
        if isinstance(self.arena, GroupOnly):
            return ["nccl"]
        left_out = {*missing(op), *(set(on_request(op)) - set(asked))}
        return [name for name in forms(op) if name not in left_out]

    def timer(self, mode: Mode) -> Timer:
        if not self.on_cuda:
            return HostTimer(self.group)
        return EagerTimer(self.group) if mode == "eager" else GraphTimer(self.group)

    def quiesce(self) -> None:
        """Every device is idle and every host has come here."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def symmetric_bytes(self) -> int:
        """Symmetric memory of this rank that the arena holds."""
        if isinstance(self.arena, GroupOnly):
            return 0
        return NUM_SLOTS * (self.arena.capacity + 4 * NUM_FLAGS)

    def reset(self) -> None:
        """What a method left that not all ranks could call is cleared away."""
        if not isinstance(self.arena, GroupOnly):
            self.arena.reset()

    def poison(self) -> None:
        """NaN into every slot, so that nothing right is left there by another form's call."""
        if isinstance(self.arena, GroupOnly):
            return
        self.quiesce()  # a turn that exchanges nothing is not a call: no peer may be in one
        for _ in range(NUM_SLOTS):
            with self.arena.turn(0) as slot:
                slot.data[slot.rank].fill_(0xFF)
        self.quiesce()
