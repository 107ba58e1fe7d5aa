"""All ranks must mean the same run: compared once, before anything is allocated.

Each rank reads its own recipe and its own data. A file edited on one node, or another corpus on one
disk, would train without a word; so every rank shows rank 0 what it was given.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megascale.config import RunConfig
from megascale.errors import ConfigError
from megascale.train.corpus import data_identity

# Where files lie may differ between nodes; what is in them may not, nor a mixture's shares: the
# identity of the data has both.
_PLACES = frozenset({"job.run_dir", "data.path", "data.mixture", "checkpoint.initial_load_path"})


def check_agreement(config: RunConfig) -> None:
    """Raise ConfigError on every rank where one was given another run than rank 0. Collective."""
    own = _flatten(config.model_dump())
    own |= {f"data.{key}": value for key, value in data_identity(config).items()}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for rank, theirs in enumerate(everyone):
        different = sorted(key for key in own if theirs.get(key) != everyone[0].get(key))
        if different:
            told = ", ".join(
                f"{key} is {theirs.get(key)!r}, rank 0 has {everyone[0].get(key)!r}"
                for key in different[:3]
            )
            raise ConfigError(
                f"rank {rank} was given another run than rank 0: {told}; start all ranks with the "
                "same recipe, the same overrides and the same data"
            )


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys, without the places of files."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flatten(value, f"{path}.")
        elif path not in _PLACES:
            flat[path] = value
    return flat
