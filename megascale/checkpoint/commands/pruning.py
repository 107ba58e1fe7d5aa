"""`megascale checkpoint prune`: the retention of a run, for a folder that no run cares for."""

from __future__ import annotations

from megascale.checkpoint.places import Location
from megascale.checkpoint.retention import apply_retention, doomed_checkpoints
from megascale.errors import ConfigError


def prune(root: Location, keep: int, *, dry_run: bool) -> list[Location]:
    """Remove all but the `keep` committed last (and never the last one that verifies), and what
    interrupted saves left before these. Returns what went, or with `dry_run` what would."""
    if keep < 1:
        raise ConfigError(f"--keep {keep}: at least 1 checkpoint stays; give 1 or more")
    if dry_run:
        return doomed_checkpoints(root, keep)
    return apply_retention(root, keep)
