"""What `megascale checkpoint` does: list, verify, prune, convert. One process, no group."""

from __future__ import annotations

from megascale.checkpoint.commands.converting import copy_checkpoint, write_safetensors
from megascale.checkpoint.commands.finding import checkpoints_at, location, newest_at, root_of
from megascale.checkpoint.commands.listing import Listed, list_all
from megascale.checkpoint.commands.pruning import prune
from megascale.checkpoint.commands.verifying import Verdict, verify_all

__all__ = [
    "Listed",
    "Verdict",
    "checkpoints_at",
    "copy_checkpoint",
    "list_all",
    "location",
    "newest_at",
    "prune",
    "root_of",
    "verify_all",
    "write_safetensors",
]
