"""One rung with real ranks: gloo processes that create the groups themselves.

    python -m megascale.train.bench_init.gloo   < a job as one line of JSON

The process imports what ranks need and forks them, so that no import is timed. "every group" is
Megatron-LM's loop over every group with torch's barrier after each (TORCH_DIST_INIT_BARRIER=1);
"own groups" is what `megascale train` does: its groups, its pipeline's channels, and a group of all
ranks on the CPU. It prints one line of JSON, a `GlooResult`.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megascale.env import become, child_environment
from megascale.errors import LaunchError
from megascale.parallel.groups import create_groups
from megascale.parallel.redis_store import RedisStore
from megascale.parallel.transfers import create_links
from megascale.topology import Mesh
from megascale.train.bench_init.sequences import megatron_groups
from megascale.train.bench_init.servers import NO_STALLS

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class GlooJob:
    """lazy: connections of a group are made when they are used (`parallel/world.py`)."""

    port: int
    store: str
    mesh: tuple[int, int, int]
    every_group: bool
    lazy: bool


@dataclass(frozen=True)
class GlooResult:
    """From the moment at which all ranks run.

    world_s     until all have joined the default group
    groups_s    from then, until the last has its groups
    creation_s  the slowest rank's, of each of its own
    """

    world_s: float
    groups_s: float
    num_groups: int
    creation_s: dict[str, float]


@dataclass(frozen=True)
class _Told:
    """Of one rank; times of the monotonic clock, which all processes share."""

    begun_s: float
    joined_s: float
    done_s: float
    num_groups: int
    creation_s: dict[str, float]


def run(job: GlooJob) -> GlooResult:
    """In a process of its own. LaunchError where a rank failed, as it said."""
    command = [sys.executable, "-m", "megascale.train.bench_init.gloo"]
    environment = child_environment({**NO_STALLS, "OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        command,
        input=json.dumps(asdict(job)),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise LaunchError(f"gloo ranks failed: {lines[-1]}")
    return GlooResult(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    job = GlooJob(**json.loads(sys.stdin.readline()))
    if job.store == "redis":
        import redis  # noqa: F401 - once, for all ranks
    become({"TORCH_DIST_INIT_BARRIER": str(int(job.every_group))})
    become({"TORCH_GLOO_LAZY_INIT": str(int(job.lazy))})
    world_size = Mesh(*job.mesh).world_size
    fork = mp.get_context("fork")
    ready, results = fork.Barrier(world_size), fork.SimpleQueue()
    ranks = [
        fork.Process(target=_rank, args=(job, rank, ready, results)) for rank in range(world_size)
    ]
    for one in ranks:
        one.start()
    told: list[_Told] = []
    try:
        while len(told) < world_size:
            found = results.get()
            if isinstance(found, str):
                raise SystemExit(found)
            told.append(found)
    finally:
        for one in ranks:
            one.kill()
    print(json.dumps(asdict(_result(told))), flush=True)


def _result(told: list[_Told]) -> GlooResult:
    joined_s = max(one.joined_s for one in told)
    names = dict.fromkeys(name for one in told for name in one.creation_s)
    return GlooResult(
        world_s=joined_s - min(one.begun_s for one in told),
        groups_s=max(one.done_s for one in told) - joined_s,
        num_groups=max(one.num_groups for one in told),
        creation_s={n: max(one.creation_s.get(n, 0.0) for one in told) for n in names},
    )


def _rank(job: GlooJob, rank: int, ready: Any, results: Any) -> None:
    try:
        ready.wait(TIMEOUT_S)
        begun_s = time.monotonic()
        mesh = Mesh(*job.mesh)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("world", _store(job, rank, mesh.world_size)),
            rank=rank,
            world_size=mesh.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        joined_s = time.monotonic()
        num_groups, creation_s = _every_group(mesh) if job.every_group else _own_groups(mesh)
        results.put(_Told(begun_s, joined_s, time.monotonic(), num_groups, creation_s))
        time.sleep(TIMEOUT_S)  # nobody goes while somebody still connects; the parent ends all
    except Exception as error:  # noqa: BLE001 - the edge of the process: it is told, not lost
        results.put(f"rank {rank}: {type(error).__name__}: {error}")


def _store(job: GlooJob, rank: int, world_size: int) -> dist.Store:
    if job.store == "redis":
        return RedisStore.open(
            f"redis://127.0.0.1:{job.port}/0",
            "gloo",
            rank=rank,
            world_size=world_size,
            timeout_s=TIMEOUT_S,
        )
    timeout = timedelta(seconds=TIMEOUT_S)
    return dist.TCPStore("127.0.0.1", job.port, timeout=timeout, wait_for_workers=False)


def _every_group(mesh: Mesh) -> tuple[int, dict[str, float]]:
    groups = megatron_groups(mesh)
    for ranks in groups:
        dist.new_group(ranks)
    return len(groups), {}


def _own_groups(mesh: Mesh) -> tuple[int, dict[str, float]]:
    groups = create_groups(mesh, tied_embeddings=True, timeout_s=TIMEOUT_S)
    creation_s = dict(groups.creation_s)

    def timed(name: str, create: Callable[[], object]) -> None:
        start_s = time.monotonic()
        create()
        creation_s[name] = time.monotonic() - start_s

    cpu, timeout = torch.device("cpu"), timedelta(seconds=TIMEOUT_S)
    timed("channels", lambda: create_links(mesh, wrap=True, device=cpu, timeout_s=TIMEOUT_S))
    timed("control", lambda: dist.new_group(backend="gloo", timeout=timeout))
    return len(creation_s), creation_s


if __name__ == "__main__":
    main()
