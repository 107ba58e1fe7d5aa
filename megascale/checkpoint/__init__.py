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

from megascale.checkpoint.full import FullReader
from megascale.checkpoint.huggingface import HfFolder, write_hf_folder
from megascale.checkpoint.load import find_latest, load_checkpoint, read_meta, verify
from megascale.checkpoint.pieces import Piece, pieces_of_range
from megascale.checkpoint.retention import apply_retention
from megascale.checkpoint.save import Snapshot, save_checkpoint, take_snapshot, write_snapshot

__all__ = [
    "FullReader",
    "HfFolder",
    "Piece",
    "Snapshot",
    "apply_retention",
    "find_latest",
    "load_checkpoint",
    "pieces_of_range",
    "read_meta",
    "save_checkpoint",
    "take_snapshot",
    "verify",
    "write_hf_folder",
    "write_snapshot",
]
