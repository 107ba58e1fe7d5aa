"""Where checkpoints lie: a local folder as a `Path`, or the URL of a storage.

Callers speak of whole checkpoints (`Location`) and of folders of them (`Root`); inside, everything
is a storage and a name relative to it. What goes in as a `Path` comes out as one.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import overload

from megascale.storage import Storage, open_storage

Location = Path | str
Root = Location | Storage


def storage_of(root: Root) -> Storage:
    """The storage whose folders are the checkpoints of `root`."""
    if isinstance(root, Path):
        return _storage(str(root.absolute()))
    return _storage(root) if isinstance(root, str) else root


@overload
def locate(root: Path, name: str) -> Path: ...
@overload
def locate(root: Root, name: str) -> Location: ...
def locate(root: Root, name: str) -> Location:
    """The checkpoint `name` of `root`, as callers speak of it."""
    if isinstance(root, Path):
        return root / name
    if isinstance(root, str):
        return f"{root.rstrip('/')}/{name}"
    return Path(root.url) / name if root.is_local else f"{root.url.rstrip('/')}/{name}"


def opened(checkpoint: Location) -> tuple[Storage, str]:
    """The storage that a checkpoint lies in, and its name there."""
    if isinstance(checkpoint, Path):
        checkpoint = checkpoint.absolute()
        return storage_of(checkpoint.parent), checkpoint.name
    root, _, name = checkpoint.rstrip("/").rpartition("/")
    return storage_of(root or "."), name


@lru_cache(maxsize=8)
def _storage(place: str) -> Storage:
    """Kept, because a storage knows its mount again: one that is gone is not written below."""
    return open_storage(place)


def name_of(checkpoint: Location) -> str:
    """`step-00000100`."""
    return (
        checkpoint.name if isinstance(checkpoint, Path) else checkpoint.rstrip("/").split("/")[-1]
    )


def is_same(one: Location, other: Location) -> bool:
    """Do both lead to the same checkpoint?"""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return str(one).rstrip("/") == str(other).rstrip("/")
