"""A folder that exists complete or not at all: written beside its place, renamed when it is whole.

An exception removes what was written; what a killed run leaves, the next one on that host clears.
No file locks: many cluster file systems have none.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def published_whole(output: Path) -> Iterator[Path]:
    """A folder beside `output` to write into, renamed to `output` when the block ends well."""
    stem = f".{output.name}.partial-{platform.node()}-"
    output.parent.mkdir(parents=True, exist_ok=True)
    for leftover in output.parent.glob(f"{glob.escape(stem)}*"):
        pid = leftover.name.removeprefix(stem)
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(leftover)
    partial = output.with_name(f"{stem}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        os.rename(partial, output)  # onto an empty folder or nothing; refused where there is more
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, and somebody else's
        return True
    return True
