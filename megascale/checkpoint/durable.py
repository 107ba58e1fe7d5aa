"""Writing so that a power cut or a kill leaves the old file or the new one, never a half.

A file's bytes are durable after `fsync` of the file, its *name* after `fsync` of its folder: both
are needed before anything says "committed".
"""

from __future__ import annotations

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write `path` by way of a temporary file beside it: it appears whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)
