"""Starts the ranks of a bench run and watches them as one.

A rank is a process of its own under torchrun's variables; rank 0 writes to the terminal, the others
to log files. When one fails or the run is long over its budget the others are ended, and the log of
the first failure is shown.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, get_args

import torch

from megascale.env import child_environment, free_port, switch_multicast_off
from megascale.errors import FluxError, LaunchError
from megascale.flux.bench.cases import OPS, ROWS, grid, shapes_of
from megascale.flux.bench.rank import INCOMPLETE, Options
from megascale.flux.default_rule import Mode
from megascale.flux.forms import FORMS
from megascale.flux.problem import Op
from megascale.flux.tuner import Tune

MODES: dict[str, list[Mode]] = {
    "eager": ["eager"],
    "graph": ["graph"],
    "both": ["eager", "graph"],
}
DTYPES = ("bfloat16", "float16", "float32")
GRACE_S = 180.0  # beyond the budget: start, compilation, and the case that was running
POLL_S = 0.1
_FINE = (None, 0, INCOMPLETE)

T = TypeVar("T", bound=str)


def bench_flux(
    *,
    ops: str = ",".join(OPS),
    shapes: str = "gpt3,llama70b",
    rows: str = ",".join(map(str, ROWS)),
    nproc: int | None = None,
    mode: str = "both",
    dtype: str | None = None,
    output: Path = Path("benchmarks/results/flux.jsonl"),
    commit: str | None = None,
    budget_s: float = 600.0,
    tune: str = "now",
    cache: Path | None = None,
    forms: str = "",
    num_configs: int = 1_000,
    arguments: Sequence[str] = (),
) -> int:
    """Run the bench on this machine; 0 where every case that was begun has its row.

    Raises FluxError for an option that is none, before anything is started.
    """
    modes = MODES[_one_of("--mode", mode, tuple(MODES))]
    num_gpus = torch.cuda.device_count()
    nproc = nproc or num_gpus or 2
    if num_gpus == 0 and mode != "eager":
        print("no GPU: eager reference forms on the CPU", flush=True)
        modes = MODES["eager"]
    asked = [_one_of("--ops", op, OPS) for op in ops.split(",")]
    options = Options(
        shapes=shapes_of(shapes),
        rows=_rows(rows),
        ops=asked,
        modes=modes,
        dtype=_one_of("--dtype", dtype or ("bfloat16" if num_gpus else "float32"), DTYPES),
        output=str(_file("--output", output)),
        budget_s=budget_s,
        tune=_one_of("--tune", tune, get_args(Tune)),
        cache="" if cache is None else str(_file("--cache", cache)),
        commit=commit or "",
        command=shlex.join(["megascale", *_reproducible(arguments)]),
        forms=_forms(forms, asked),
        num_configs=num_configs,
    )
    if num_gpus and nproc > num_gpus:
        raise FluxError(f"--nproc is {nproc} and there are {num_gpus} GPUs; start at most as many")
    if not grid(options.shapes, options.rows, options.ops, nproc, options.modes):
        raise FluxError(f"no case has --ops {ops} --shapes {shapes} --rows {rows} --mode {mode}")
    switch_multicast_off()
    with tempfile.TemporaryDirectory(prefix="megascale-bench-") as folder:
        return _run(options, nproc, Path(folder))


def _reproducible(arguments: Sequence[str]) -> list[str]:
    """The arguments that say what was measured; not where rows went, nor the commit again."""
    kept = iter(arguments)
    return [a for a in kept if a not in ("--output", "--commit", "--cache") or not next(kept)]


def _one_of(option: str, value: str, legal: tuple[T, ...]) -> T:
    for name in legal:
        if name == value:
            return name
    raise FluxError(f"{option} has {value!r}; legal are {', '.join(legal)}")


def _rows(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise FluxError(f"--rows is {text!r}; give positive numbers such as 1,16,2048")
    return list(dict.fromkeys(found))


def _forms(text: str, ops: Sequence[Op]) -> list[str]:
    """The forms that are named; each is one of an operator that is measured."""
    legal = tuple(dict.fromkeys(name for op in ops for name in FORMS[op]))
    return [_one_of("--forms", name, legal) for name in text.split(",") if name]


def _file(option: str, path: Path) -> Path:
    """A path to which a file can be written. Its folder is made later, where there is none."""
    if path.is_dir():
        raise FluxError(f"{option} {path} is a folder; give a file, such as {path / 'NAME'}")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise FluxError(f"{option} {path} lies below {above}, which is a file; give another path")
    there = path if path.exists() else above
    if not os.access(there, os.W_OK):
        raise FluxError(f"{option} {path} cannot be written: no permission for {there}")
    return path


def _run(options: Options, nproc: int, logs: Path) -> int:
    port = free_port()
    ranks = [_start(options, rank, nproc, port, logs) for rank in range(nproc)]
    deadline = time.monotonic() + options.budget_s + GRACE_S
    try:
        while any(process.poll() is None for process in ranks):
            if any(process.poll() not in _FINE for process in ranks):
                time.sleep(1.0)  # peers that fail in the same moment write their reasons too
                break
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the bench is {GRACE_S:.0f} s over its budget of {options.budget_s:.0f} s and "
                    f"was ended; rows measured until then are in {options.output}"
                    + _tails(ranks, logs)
                )
            time.sleep(POLL_S)
        codes = [process.poll() for process in ranks]
    finally:
        _stop(ranks)
    for rank, code in enumerate(codes):
        if code not in _FINE:
            error = LaunchError(f"rank {rank} of {nproc} ended with {code}{_tails(ranks, logs)}")
            error.exit_code = code if 0 < code < 128 else error.exit_code
            raise error
    return max(code or 0 for code in codes)


def _start(
    options: Options, rank: int, nproc: int, port: int, logs: Path
) -> subprocess.Popen[bytes]:
    environment = child_environment(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    environment.setdefault("OMP_NUM_THREADS", "1")
    with (logs / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "megascale.flux.bench.rank", options.dump()],
            env=environment,
            stdout=None if rank == 0 else log,
            stderr=None if rank == 0 else log,
        )


def _stop(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    for process in ranks:
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tails(ranks: list[subprocess.Popen[bytes]], logs: Path) -> str:
    """The last lines of each log that has any; rank 0's are on the terminal."""
    parts = []
    for rank in range(1, len(ranks)):
        text = (logs / f"rank{rank}.log").read_text(errors="replace")
        if text:
            parts.append(f"rank {rank}'s log ends:\n" + "\n".join(text.splitlines()[-15:]))
    return "".join(f"\n{part}" for part in parts)
