"""The memory slots of a run: on what this rank keeps its state where its agent gave it a place.

Without an agent nobody would own the memory once the trainer is gone, so there are no slots.
"""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import timedelta

import torch.distributed as dist

from megascale.checkpoint import Piece
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory import MemorySlots
from megascale.env import agent_environment
from megascale.shards import Box
from megascale.train.assemble import Assembly
from megascale.train.run_folder import RunFolder
from megascale.train.state import Progress, checkpoint_meta, state_pieces

logger = logging.getLogger(__name__)


def open_slots(
    assembly: Assembly, folder: RunFolder, ranks: Ranks, data: dict[str, str]
) -> MemorySlots | None:
    """Collective over `ranks`. None on all of them where the run wants none, or one has no place.

    data  `corpus.data_identity`
    """
    settings, agent = assembly.config.checkpoint, agent_environment()
    if not (settings.enable and settings.memory_interval):
        return None
    prefixes = ranks.gather(lambda: agent.memory_slots)
    without = [rank for rank, prefix in enumerate(prefixes) if prefix is None]
    if without or agent.memory_slots is None:
        if ranks.is_writer:
            logger.warning(
                "checkpoint.memory_interval is %d, but rank %d has no memory that outlives it: "
                "agents give it (`megascale run`), in /dev/shm; training goes on without",
                settings.memory_interval,
                without[0],
            )
        return None
    on_device = assembly.device.type == "cuda"
    return MemorySlots(
        agent.memory_slots,
        kept_pieces(assembly),
        assembly.mesh,
        ranks,
        identity=ranks.writer_does(lambda: _identity(assembly, folder, data)),
        epoch=agent.epoch,
        device=assembly.device,
        copies=settings.memory_copies,
        is_behind=on_device,
        group_behind=_group_behind(assembly) if on_device else None,
    )


def kept_pieces(assembly: Assembly) -> list[Piece]:
    """All that the rank needs to go on, copies of what others hold too, and the updates' number."""
    count = Piece("count/updates", (), Box((), ()), assembly.optimizer.step_count)
    return [*state_pieces(assembly.zero, assembly.optimizer, "all"), count]


def _identity(assembly: Assembly, folder: RunFolder, data: dict[str, str]) -> str:
    """What a save must share with the run that restores it, as a hash."""
    config = assembly.config
    meta = checkpoint_meta(config, Progress(), 0, data)
    entry = [str(folder.path.resolve()), config.optimizer.name, meta]
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _group_behind(assembly: Assembly) -> dist.ProcessGroup | None:
    """All ranks on the CPU, for the thread that works behind training: no other thread's."""
    if assembly.mesh.world_size == 1:
        return None
    timeout = timedelta(seconds=assembly.config.comm.timeout_s)
    return dist.new_group(backend="gloo", timeout=timeout)
