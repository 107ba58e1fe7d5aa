"""A folder that several tests look at, made once for all workers of a test run.

A fixture of a module or a session is made by every worker that meets a test of it: of four workers,
a run of eight ranks is trained four times. Here who comes first makes it, the others wait for it.
Nobody changes it: take a copy for that.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """The folder `name` of this test run, which `make` made; an error of `make` is that of each
    test that wants it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, is_made = root / f"shared-{name}", root / f"shared-{name}.made"
    with (root / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            is_made.touch()
    return folder
