"""The memory of a run that states are copied to: for the memory tier, and on their way to disk.

Where the ranks have an agent the memory tier outlives them. Without one nobody would own the memory
once the trainer is gone: then there are slots only where checkpoints are written behind training,
of the trainer's own memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megascale.checkpoint import Piece
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory import MemorySlots
from megascale.checkpoint.memory.pacing import PageSignal, never_busy
from megascale.env import AgentEnvironment, agent_environment
from megascale.shards import Box
from megascale.telemetry.recorder import Recorder
from megascale.train.assemble import Assembly
from megascale.train.control_groups import group_for_copies
from megascale.train.host import runs_ahead
from megascale.train.run_folder import RunFolder
from megascale.train.state import Progress, checkpoint_meta, state_pieces

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenSlots:
    """is_tier  they outlive this process: states are kept there every `memory_interval` steps"""

    slots: MemorySlots
    is_tier: bool


def open_slots(
    assembly: Assembly,
    folder: RunFolder,
    recorder: Recorder,
    ranks: Ranks,
    data: dict[str, str],
) -> OpenSlots | None:
    """Collective over `ranks`. None on all of them where the run needs none.

    data  `corpus.data_identity`
    """
    settings, agent = assembly.config.checkpoint, agent_environment()
    every = settings.memory_interval if settings.enable else 0
    is_tier = every > 0 and _all_have_a_place(every, ranks, agent)
    if not (is_tier or settings.is_behind):
        return None
    # where the loop is not a step ahead, a kill behind training could cost two steps
    is_behind = runs_ahead(assembly.config.training, assembly.device)
    slots = MemorySlots(
        agent.memory_slots if is_tier else None,
        state_pieces(assembly.zero, assembly.optimizer, "counted"),
        _copies(assembly),
        assembly.mesh,
        ranks,
        identity=ranks.writer_does(lambda: _identity(assembly, folder, data)),
        epoch=agent.epoch,
        device=assembly.device,
        num_own=2 * is_tier + settings.is_behind,
        on_peers=settings.memory_copies,
        is_behind=is_behind,
        group_behind=group_for_copies(assembly) if is_behind and is_tier else None,
        network_is_busy=_signal(agent),
        timeout_s=assembly.config.comm.timeout_s,
        told=lambda kind, detail: recorder.incident(kind, **cast(dict[str, Any], detail)),
    )
    return OpenSlots(slots, is_tier)


def _all_have_a_place(every: int, ranks: Ranks, agent: AgentEnvironment) -> bool:
    prefixes = ranks.gather(lambda: agent.memory_slots)
    without = [rank for rank, prefix in enumerate(prefixes) if prefix is None]
    if without and ranks.is_writer:
        logger.warning(
            "checkpoint.memory_interval is %d, but rank %d has no memory that outlives it: agents "
            "give it (`megascale run`), in /dev/shm; training goes on without",
            every,
            without[0],
        )
    return not without


def _copies(assembly: Assembly) -> list[Piece]:
    """What the rank needs to go on and does not count: copies, and the updates' number."""
    count = Piece("count/updates", (), Box((), ()), assembly.optimizer.step_count)
    return [*state_pieces(assembly.zero, assembly.optimizer, "copies"), count]


def _signal(agent: AgentEnvironment) -> Callable[[], bool]:
    page = agent.progress_page
    return never_busy if page is None else PageSignal(Path(page))


def _identity(assembly: Assembly, folder: RunFolder, data: dict[str, str]) -> str:
    """What a save must share with the run that restores it, as a hash."""
    config = assembly.config
    meta = checkpoint_meta(config, Progress(), 0, data)
    entry = [str(folder.path.resolve()), config.optimizer.name, meta]
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
