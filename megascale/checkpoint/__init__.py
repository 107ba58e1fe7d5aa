"""Checkpoints that any layout loads from any other (MegaScale 4.4), and Hugging Face folders.

A caller describes its state as `Piece`s: views of live storage with a name and a place in a logical
tensor. This package writes, commits, finds, verifies and loads them; it receives process groups and
never builds one, and knows no model.

    directory = save_checkpoint(root, step, pieces, meta, group=group)
    apply_retention(root, keep_latest_k, protect=[loaded_from], known_good=directory)  # rank 0
    path = find_latest(root, group=group)
    load_checkpoint(path, pieces, group=group, verified=True)

All but `apply_retention`, `read_meta`, `FullReader` and the Hugging Face functions are collective
over `group`; with None one process is the whole group.
"""

from __future__ import annotations

from megascale.checkpoint.behind import BackgroundSaves, Saved, SaveFailed
from megascale.checkpoint.digest import agree_digests, digest_pieces, launch_digests
from megascale.checkpoint.full import FullReader
from megascale.checkpoint.huggingface import HfFolder, write_hf_folder
from megascale.checkpoint.load import (
    LoadedCheckpoint,
    find_latest,
    load_checkpoint,
    load_newest,
    read_meta,
    verify,
)
from megascale.checkpoint.pieces import Piece, pieces_of_range
from megascale.checkpoint.reading import DamagedError, PlanCache
from megascale.checkpoint.retention import apply_retention
from megascale.checkpoint.save import save_checkpoint
from megascale.checkpoint.staged import Staged

__all__ = [
    "BackgroundSaves",
    "DamagedError",
    "FullReader",
    "HfFolder",
    "LoadedCheckpoint",
    "Piece",
    "PlanCache",
    "SaveFailed",
    "Saved",
    "Staged",
    "agree_digests",
    "apply_retention",
    "digest_pieces",
    "find_latest",
    "launch_digests",
    "load_checkpoint",
    "load_newest",
    "pieces_of_range",
    "read_meta",
    "save_checkpoint",
    "verify",
    "write_hf_folder",
]
