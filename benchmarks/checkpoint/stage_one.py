"""Stage 1 alone: device memory to a memory slot, against the copy limit measured first.

    python -m benchmarks.checkpoint.stage_one [--gb N] [--rounds N]

The limit is one copy of 4 GiB to pinned memory, the best of five. The state is what a rank of a 7B
in DP 2 holds: masters and two moments in fp32, a few hundred pieces in buckets. The first save
makes, fills and registers the slots; it is timed apart.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from megascale.checkpoint import Piece
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory import MemorySlots
from megascale.env import child_environment
from megascale.shards import Box
from megascale.topology import Mesh
from megascale.train.bench.rows import Origin

SHARE = 0.9
_LIMIT_BYTES = 4 << 30
_KINDS, _BUCKETS, _PIECES = ("master", "exp_avg", "exp_avg_sq"), 16, 8


def copy_rate() -> float:
    """Bytes per second of a copy to pinned memory; on a CPU, of a copy in memory."""
    on_gpu = torch.cuda.device_count() > 0
    num_bytes = _LIMIT_BYTES if on_gpu else 1 << 28
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    return num_bytes / min(
        _seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(5)
    )


def copy_rate_of_a_process() -> float:
    """The same, in a process whose context and pinned memory are gone afterwards."""
    program = "from benchmarks.checkpoint.stage_one import copy_rate; print(copy_rate())"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment({}),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(told.stdout.split()[-1])


def state(num_bytes: int, device: torch.device) -> list[Piece]:
    """Pieces of about so many bytes: rows of matrices, neighbours in a bucket's storage."""
    columns = 4096
    rows = max(1, num_bytes // (len(_KINDS) * _BUCKETS * _PIECES * columns * 4))
    pieces = []
    for kind in _KINDS:
        for bucket in range(_BUCKETS):
            flat = torch.rand(_PIECES * rows * columns, device=device)
            for number, part in enumerate(flat.split(rows * columns)):
                key = f"{kind}/layers.{bucket}.part{number}.weight"
                box = Box((0, 0), (rows, columns))
                pieces.append(Piece(key, (rows, columns), box, part.view(rows, columns)))
    return pieces


def measure(num_bytes: int, rounds: int) -> tuple[float, list[float], list[float], int]:
    """Seconds of the first save, of the copies, of hash and marks behind them; bytes."""
    device = torch.device("cuda:0" if torch.cuda.device_count() else "cpu")
    pieces = state(num_bytes, device)
    folder = Path(tempfile.mkdtemp(prefix="megascale-bench-", dir="/dev/shm"))
    try:
        slots = MemorySlots(
            str(folder / "rank00000"),
            pieces,
            [],
            Mesh(1, 1, 1),
            Ranks(None),
            identity="bench",
            epoch=0,
            device=device,
            is_behind=device.type == "cuda",
        )
        first_s = _seconds(partial(_save, slots, 0))
        _check(slots, pieces)
        copies, behind = [], []
        for step in range(1, rounds + 1):
            slots.join()
            copies.append(_seconds(partial(slots.begin, step, step)))
            slots.before_update()
            behind.append(_seconds(partial(_complete, slots)))
        return first_s, copies, behind, sum(piece.num_bytes for piece in pieces)
    finally:
        shutil.rmtree(folder)


def _save(slots: MemorySlots, step: int) -> None:
    slots.begin(step, step)
    slots.before_update()
    _complete(slots)


def _check(slots: MemorySlots, pieces: list[Piece]) -> None:
    """What was saved comes back."""
    before = [piece.tensor[::97].clone() for piece in pieces]
    for piece in pieces:
        piece.tensor.zero_()
    if slots.restore(None) is None:
        raise SystemExit("nothing was kept in memory")
    for piece, values in zip(pieces, before, strict=True):
        if not torch.equal(piece.tensor[::97], values):
            raise SystemExit(f"{piece.key} came back with other values")


def _complete(slots: MemorySlots) -> None:
    slots.settled()
    slots.join()


def _seconds(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    since = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - since


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=42.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    rate = copy_rate()
    first_s, copies, behind, num_bytes = measure(int(given.gb * 1e9), given.rounds)
    value = num_bytes / statistics.median(copies) / rate
    origin = Origin.here(
        num_ranks=1,
        on_gpus=torch.cuda.device_count() > 0,
        command=f"python -m benchmarks.checkpoint.stage_one --gb {given.gb:g} "
        f"--rounds {given.rounds}",
        given_commit=given.commit or None,
    )
    more = {
        "copy_gb_s": num_bytes / statistics.median(copies) / 1e9,
        "limit_gb_s": rate / 1e9,
        "behind_s": statistics.median(behind),
        "first_s": first_s,
        "bytes": num_bytes,
    }
    line = Line({"line": "stage-one", "ranks": 1}, "share of the limit", value, (">=", SHARE), more)
    print(more)
    write_rows([line], origin, given.output)


if __name__ == "__main__":
    main()
