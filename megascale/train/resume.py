"""What a resumed run is asked to do otherwise than before. No torch.

The arguments of a start decide alone, so what an earlier start had on top of the recipe is gone
unless it is given again. Nothing of that is forbidden but another optimizer, whose moments would
be read as what they are not; all of it is said.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from megascale.config import RunConfig
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)

_ABSENT = "(not set)"


def changed_keys(config_file: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key to its value in `config_file` and in `config`, where the two differ.

    The file is read as it is: it may come from a version with other keys.
    """
    try:
        stored = json.loads(config_file.read_text())
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be compared with the configuration: %s", config_file, error)
        return {}
    old, new = _flat(stored), _flat(config.model_dump(mode="json"))
    return {
        key: (old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in (*new, *(key for key in old if key not in new))
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    }


def refuse_another_optimizer(changed: dict[str, tuple[Any, Any]]) -> None:
    """Raises CheckpointError."""
    if "optimizer.name" in changed:
        old, new = changed["optimizer.name"]
        raise CheckpointError(
            f"the run was trained with optimizer.name {old!r}, this start has {new!r}, to which "
            f"the saved moments mean something else; set optimizer.name={old}, or start a new run "
            "from its weights with checkpoint.initial_load_path"
        )


def describe_changes(changed: dict[str, tuple[Any, Any]]) -> str:
    """One line: "training.global_batch_size: 8 -> 4, optimizer.lr: 0.001 -> 0.0003"."""
    return ", ".join(
        f"{key}: {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in changed.items()
    )


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(section, dict) or (prefix and not section):
        return {prefix: section}
    return {
        name: value
        for key, inner in section.items()
        for name, value in _flat(inner, f"{prefix}.{key}" if prefix else key).items()
    }
