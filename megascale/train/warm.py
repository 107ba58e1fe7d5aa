"""A rank before anybody has said which: an interpreter that has imported what a trainer needs.

    python -m megascale.train.warm READY_FD LOCAL_RANK

It imports, writes one byte to READY_FD, and waits for a line of JSON on standard input:

    {"arguments": [...], "environment": {...}, "log": PATH}

Then it is that rank: the same program as `python -m megascale ARGUMENTS`, in the same process. A
fault costs 2 to 6 s less this way, which an interpreter, torch and 2,000 modules take. "module"
names another program than megascale. Children of `train/template.py` wait here too.

Nothing is done before the line that the line could decide: no CUDA context, no thread, no process
group, no logging. Variables that are read at imports (OMP_NUM_THREADS, PYTHON*, TORCH_*) must be
set when it starts; `environment` is for what names a rank and an epoch. Without a line, when the
pipe ends, it ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import runpy
import select
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megascale.env import become

PAGE = "MEGASCALE_PROGRESS_PAGE"  # its long value in the first environment is room for the others
_MODULES = ("megascale.cli", "megascale.train.start", "megascale.train.rank", "numpy.random")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_ENV_START = 47  # of /proc/PID/stat after the name, as proc(5) numbers it less 3


@dataclass(frozen=True)
class Order:
    """What to become."""

    arguments: list[str]
    environment: dict[str, str]
    log: str
    module: str = "megascale"


def main() -> None:
    ready, local_rank = int(sys.argv[1]), int(sys.argv[2])
    oom_score = be_expendable()
    try:
        import_all(local_rank)
    except BaseException:
        if select.select([0], [], [], 0)[0]:  # it is a rank already: its log is to have the reason
            _take_over(_read_order(), oom_score)
        raise
    gc.collect()
    gc.freeze()  # the loop's own collection, before its first step, then has 0.15 s less to do
    with suppress(BrokenPipeError):  # it was told already, and nobody waits for the byte
        os.write(ready, b"r")
    os.close(ready)
    become_what_is_told(oom_score)


def become_what_is_told(oom_score: str) -> None:
    """Wait for the line, then be that program. Returns when it has ended, or no line comes.

    oom_score  of `be_expendable`
    """
    order = _read_order()
    if order is None:
        return
    _take_over(order, oom_score)
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def import_all(local_rank: int) -> None:
    """What a rank imports before its first step."""
    for name in _MODULES:
        importlib.import_module(name)
    import torch

    if local_rank == 0 and importlib.util.find_spec("tensorboard"):  # it may become rank 0
        with suppress(ImportError):
            importlib.import_module("tensorboard.summary")
    if torch.version.cuda is not None:  # asks the build, not the driver
        with suppress(ImportError):  # without triton the trainer says what it needs
            importlib.import_module("megascale.optim.kernel")
            _import_launchers()


def _import_launchers() -> None:
    ops = importlib.import_module("megascale.ops")
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if module.name.endswith(".launch"):
            importlib.import_module(module.name)


def _read_order() -> Order | None:
    """None where the pipe ends first."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            return None
        line += more
    return Order(**json.loads(line))


def _take_over(order: Order | None, oom_score: str) -> None:
    if order is None:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    os.close(log)
    os.close(nothing)
    with suppress(OSError):
        _OOM_SCORE.write_text(oom_score)
    become(order.environment)
    show_environment(PAGE, order.environment)
    sys.argv[1:] = order.arguments


def be_expendable() -> str:
    """Under memory pressure the kernel takes this process before a rank; the score before."""
    try:
        before = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text("1000")
    except OSError:
        return "0"
    return before


def show_environment(name: str, variables: Mapping[str, str]) -> bool:
    """Let /proc/PID/environ of this process, and of those that it forks, have `variables`: agents
    and people tell by it whose a process is. False where there is no room.

    They take the place of variable `name`, in the memory that the kernel shows. Nobody else reads
    it there: the C library has its own copy once the variable was set again.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_START + 1])
    if not start < end:
        return False
    block = ctypes.string_at(start, end - start)
    at = (b"\0" + block).find(f"\0{name}=".encode())
    room = block.find(b"\0", at) - at
    new = b"\0".join(os.fsencode(f"{key}={value}") for key, value in variables.items())
    if at < 0 or len(new) > room:
        return False
    ctypes.memmove(start + at, new.ljust(room, b"\0"), room)
    return True


if __name__ == "__main__":
    main()
