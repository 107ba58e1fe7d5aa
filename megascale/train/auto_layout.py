"""`parallelism.layout = "auto"` in training: who chooses, and where the choice is kept.

Whoever starts the ranks chooses, once: `train` for the ranks of this machine, which get the layout
as `--set` arguments. Under torchrun or srun nobody of ours starts them; there rank 0 chooses when
the ranks have met, and tells the others (`agree_on_layout`), so that all have one layout even where
their machines differ. The run folder keeps it resolved (config.json) and why (layout.json); a
resumed run keeps what is stored there for as long as it fits the number of ranks.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from megascale.config import RunConfig, with_overrides
from megascale.env import RankEnvironment
from megascale.errors import ConfigError, MegascaleError
from megascale.plan.search.auto import Resolved, resolve_layout
from megascale.plan.search.here import gpu_name
from megascale.train.corpus import resolve_vocabulary
from megascale.train.devices import check_devices_can, count_gpus, runs_on_gpus
from megascale.train.run_folder import RunFolder

logger = logging.getLogger(__name__)


def is_open(config: RunConfig) -> bool:
    """Whether the layout is still to be chosen."""
    return config.parallelism.layout == "auto"


def choose(config: RunConfig, num_ranks: int, *, resume: bool) -> Resolved:
    """By whoever starts the ranks. Raises ConfigError with what the user should read."""
    folder = RunFolder(config.job.run_dir)
    stored = folder.load_config() if resume and folder.exists else None
    sized = config if config.model.vocab_size else resolve_vocabulary(config)
    return resolve_layout(sized, num_ranks, lambda: device_of(config), stored=stored)


def device_of(config: RunConfig) -> str | None:
    """Name of the GPUs that the ranks of this machine get; None: CPUs."""
    here = count_gpus()
    if not runs_on_gpus(config, here):
        return None
    found = gpu_name() if here else None
    if found is None:
        raise ConfigError(
            "parallelism.layout is 'auto' for GPUs whose name this machine does not tell; set "
            "parallelism.cluster to h200, h100, a100 or a file of `megascale calibrate`"
        )
    return found


def keep(resolved: Resolved, folder: RunFolder) -> None:
    """Why the run has this layout, beside its configuration. What an earlier start chose stays."""
    if resolved.choice is None:
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    text = json.dumps(resolved.choice.document(), indent=2)
    (folder.path / "layout.json").write_text(text + "\n", encoding="utf-8")


def agree_on_layout(config: RunConfig, rank: RankEnvironment, *, resume: bool) -> RunConfig:
    """By ranks that nobody of ours started: rank 0 chooses, all have it. Collective.

    Raises ConfigError on every rank where rank 0 finds none, or the devices cannot have it.
    """
    import torch.distributed as dist

    answer: list[Any] = [None, None]  # overrides, or why there are none
    if rank.global_rank == 0:
        try:
            resolved = choose(config, rank.world_size, resume=resume)
            logger.info("%s", resolved.told)
            keep(resolved, RunFolder(config.job.run_dir))
            answer[0] = resolved.overrides
        except MegascaleError as error:  # everybody waits for an answer
            answer[1] = str(error)
    dist.broadcast_object_list(answer)
    overrides, problem = answer
    if overrides is None:
        raise ConfigError(problem)
    agreed = with_overrides(config, overrides)
    check_devices_can(agreed, rank.world_size)
    return agreed
