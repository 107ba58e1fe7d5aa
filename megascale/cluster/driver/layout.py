"""`parallelism.layout = "auto"` of a job: the driver chooses before it starts anything.

Trainers get the layout as `--set` arguments, so that every epoch has the same one; the data degree
follows from the ranks, so that a job that shrinks keeps it too. What the run folder holds is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megascale.config import RunConfig, load_config
from megascale.errors import ConfigError
from megascale.plan.search.auto import resolve_layout
from megascale.plan.search.here import gpu_name


def with_layout(
    recipe: Path, overrides: Sequence[str], num_ranks: int, *, are_ranks_here: bool
) -> tuple[RunConfig, list[str]]:
    """Configuration and overrides with a layout; as they are where one is given.

    are_ranks_here  trainers run on this machine, whose devices are theirs
    Raises ConfigError where there is no layout, or the trainers' devices are not known.
    """
    config = load_config(recipe, overrides)
    if config.parallelism.layout == "given":
        return config, list(overrides)
    file = Path(config.job.run_dir) / "config.json"
    stored = load_config(file) if file.exists() else None

    def device() -> str | None:
        if config.training.device == "cpu":
            return None
        found = gpu_name() if are_ranks_here else None
        if found is None and (config.training.device == "cuda" or not are_ranks_here):
            raise ConfigError(
                "parallelism.layout is 'auto', and the driver does not know the devices of the "
                "nodes; set parallelism.cluster to h200, h100, a100 or a file of `megascale "
                "calibrate` (training.device=cpu for nodes without GPUs)"
            )
        return found

    resolved = resolve_layout(config, num_ranks, device, stored=stored)
    print(resolved.told, flush=True)
    overrides = [*overrides, *resolved.overrides]
    return load_config(recipe, overrides), overrides
