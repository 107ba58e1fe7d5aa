"""A rank that lost its node gets its state from its partner's memory: seconds, and by which way.

    python -m benchmarks.checkpoint.recovery [--gb N] [--ways mapped,connections,group]

Two ranks of two agents on this machine, each with so many GB of state (on a GPU where there is one:
both use the first where there is no second). They save, end, rank 1 loses its folder, and both
start anew, as after a restart. Timed is `MemorySlots.restore` of the slower rank: the agreement,
the check of every value, the transfer, the copy to the device. Process starts are not in it.
Values are compared before a row is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from benchmarks.checkpoint.stage_one import state
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.memory import MemorySlots
from megascale.env import free_port
from megascale.topology import Mesh
from megascale.train.bench.rows import Origin

MOST_S = 5.0
WAYS = ("mapped", "connections", "group")


def _open(rank: int, folder: Path, num_bytes: int) -> tuple[MemorySlots, list[Any]]:
    count = torch.cuda.device_count()
    device = torch.device(f"cuda:{rank % count}" if count else "cpu")
    torch.manual_seed(rank)
    pieces = state(num_bytes, device)
    agent = folder / f"agent{rank}"
    agent.mkdir(exist_ok=True)
    slots = MemorySlots(
        str(agent / "rank"),
        pieces,
        [],
        Mesh(1, 2, 1),
        Ranks(dist.group.WORLD),
        identity="bench",
        epoch=0,
        device=device,
    )
    return slots, pieces


def _saves(rank: int, folder: Path, num_bytes: int, _ways: tuple[str, ...]) -> float:
    slots, _ = _open(rank, folder, num_bytes)
    slots.begin(1, 1)
    slots.before_update()
    slots.settled()
    slots.join()
    return 0.0


def _restores(rank: int, folder: Path, num_bytes: int, ways: tuple[str, ...]) -> float:
    slots, pieces = _open(rank, folder, num_bytes)
    expected = [piece.tensor[::97].clone() for piece in pieces]
    for piece in pieces:
        piece.tensor.zero_()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    since = time.monotonic()
    stamp = slots.restore(None, ways=ways)
    seconds = time.monotonic() - since
    assert stamp is not None, "nothing was restored"
    for piece, values in zip(pieces, expected, strict=True):
        assert torch.equal(piece.tensor[::97], values), piece.key
    return seconds


def _rank(
    rank: int,
    work: Callable[[int, Path, int, tuple[str, ...]], float],
    port: int,
    folder: Path,
    num_bytes: int,
    ways: tuple[str, ...],
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    seconds = work(rank, folder, num_bytes, ways)
    (folder / f"seconds{rank}").write_text(str(seconds))
    dist.barrier()
    dist.destroy_process_group()


def measure(num_bytes: int, ways: tuple[str, ...]) -> float:
    """Seconds of the slower rank."""
    folder = Path(tempfile.mkdtemp(prefix="megascale-bench-", dir="/dev/shm"))
    try:
        for work in (_saves, _restores):
            mp.spawn(_rank, (work, free_port(), folder, num_bytes, ways), nprocs=2)
            if work is _saves:
                shutil.rmtree(folder / "agent1")
        return max(float((folder / f"seconds{rank}").read_text()) for rank in (0, 1))
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=42.0)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    origin = Origin.here(
        num_ranks=min(2, torch.cuda.device_count()) or 2,
        on_gpus=torch.cuda.device_count() > 0,
        command=f"python -m benchmarks.checkpoint.recovery --gb {given.gb:g} --ways {given.ways}",
        given_commit=given.commit or None,
    )
    for way in given.ways.split(","):
        seconds = measure(int(given.gb * 1e9), (way,))
        case = {"line": "recovery-from-a-peer", "ranks": 2, "way": way, "gb": given.gb}
        target = ("<=", MOST_S) if given.gb >= 42 else None
        more = {"gb_s": given.gb / seconds, "devices": torch.cuda.device_count()}
        write_rows([Line(case, "s", seconds, target, more)], origin, given.output)


if __name__ == "__main__":
    main()
