"""`megascale train` as a user starts it: in a process of its own, or in this one for refusals.

A process of its own is a forked one (`tests/programs.py`) but where a test is about the start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from megascale import cli
from tests.programs import Program
from tests.train.harness import TINY

Process = subprocess.Popen[str] | Program
SMALL = [*TINY, "model.num_layers=2", "training.global_batch_size=4", "metrics.tensorboard=false"]


def write_recipe(folder: Path) -> Path:
    """An empty recipe: everything is in `--set`."""
    recipe = folder / "recipe.toml"
    recipe.write_text("# all defaults\n")
    return recipe


def flags(settings: Sequence[str]) -> list[str]:
    return [argument for setting in settings for argument in ("--set", setting)]


FRESH = ("-m", "megascale")


@contextmanager
def started(
    arguments: Sequence[str], program: Sequence[str] = (), folder: Path | None = None
) -> Iterator[Process]:
    """The program under way; whatever is left of it and its children is killed at the end.

    program  arguments of a fresh interpreter (`FRESH`, or a launcher's); none: forked
    folder   where it runs; None: here
    """
    start = partial(_start_fresh, program) if program else Program
    process = start(arguments, folder)
    family = psutil.Process(process.pid)
    try:
        yield process
    finally:
        left = [family, *family.children(recursive=True)] if process.poll() is None else []
        for one in left:
            one.kill()
        process.communicate()


def _start_fresh(
    program: Sequence[str], arguments: Sequence[str], folder: Path | None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rank_process(parent: Process, rank: int) -> psutil.Process:
    """The process of one local rank: a launcher starts its ranks in order, and nothing else."""
    ranks = psutil.Process(parent.pid).children()
    assert len(ranks) > rank, f"{parent.args!r} has no rank {rank}"
    return sorted(ranks, key=lambda one: (one.create_time(), one.pid))[rank]


def wait_until(condition: Callable[[], bool], process: Process) -> None:
    """Wait for `condition`; fails when the process ends before, or nothing comes in 60 s."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited for 60 s"
        time.sleep(0.02)


def num_lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def end(process: Process, timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Exit code, output and error output of a process that ends by itself."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        raise
    return process.wait(), output, errors


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of `megascale ARGUMENTS` in this process: quick, for what is refused or small."""
    monkeypatch.setattr(sys, "argv", ["megascale", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert isinstance(code, int), code
    return code


def train_here(
    monkeypatch: pytest.MonkeyPatch, run: Path, *settings: str, more: Sequence[str] = ()
) -> int:
    """Exit code of training two steps in `run`, with `settings` on top."""
    given = flags([*SMALL, "training.steps=2", f"job.run_dir={run}", *settings])
    return run_here(monkeypatch, "train", str(write_recipe(run.parent)), *given, *more)


def tree(folder: Path) -> dict[str, int]:
    """Every file below `folder` and when it was written; empty folders too."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }
