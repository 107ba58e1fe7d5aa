"""One rung at one size, with simulated ranks: a server, and processes that play its clients."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from megascale.env import child_environment
from megascale.errors import LaunchError
from megascale.parallel.redis_commands import SCRIPTS
from megascale.topology import Mesh
from megascale.train.bench_init.clients import Job, Played
from megascale.train.bench_init.redis_calls import encoded
from megascale.train.bench_init.sequences import DONE, GROUPS, JOINED, Barrier, megatron_groups
from megascale.train.bench_init.servers import Server, serving

PROBE_GROUPS = 3
_DEADLINE_S = 1200.0  # of anything: groups are chosen by the budget, this is for what hangs


@dataclass(frozen=True)
class Rung:
    """barrier  of every group, over the world; None: ordered creation, without"""

    store: str
    barrier: Barrier | None

    @property
    def order(self) -> str:
        return "own groups" if self.barrier is None else "every group"


@dataclass(frozen=True)
class Measured:
    """seconds   from the first connection until the last rank had its groups, scaled to all groups
    where `num_timed` is less than `num_groups`

    join_s, groups_s, ids_s  of what was timed: until all had joined; had passed the barriers; the
    rest
    server_cpu_s, clients_cpu_s  processor time meanwhile
    """

    seconds: float
    num_groups: int
    num_timed: int
    join_s: float
    groups_s: float
    ids_s: float
    requests: int
    server_cpu_s: float
    clients_cpu_s: float

    @property
    def is_whole(self) -> bool:
        return self.num_timed == self.num_groups


def mesh_of(num_ranks: int) -> Mesh:
    """The paper's layout, tensor 8 and pipeline 8; of fewer than 64 ranks a smaller pipeline."""
    tensor = min(8, num_ranks)
    pipeline = min(8, num_ranks // tensor)
    return Mesh(tensor, num_ranks // (tensor * pipeline), pipeline)


def measure(rung: Rung, num_ranks: int, *, budget_s: float, processes: int) -> Measured:
    """Time the rung; of more groups than `budget_s` allows, the first so many.

    Raises LaunchError: a client or the server failed, told as it said.
    """
    mesh = mesh_of(num_ranks)
    if rung.barrier is None:
        return _run(rung, mesh, None, processes)
    num_groups = len(megatron_groups(mesh))
    probe = _run(rung, mesh, min(PROBE_GROUPS, num_groups), processes)
    each_s = probe.groups_s / (probe.num_timed + 1)  # and the world's own
    affordable = int((budget_s - probe.join_s - probe.ids_s) / each_s)
    if affordable <= PROBE_GROUPS:
        return probe
    return _run(rung, mesh, min(num_groups, affordable), processes)


def _run(rung: Rung, mesh: Mesh, num_timed: int | None, processes: int) -> Measured:
    num_ranks, start = mesh.world_size, uuid.uuid4().hex
    with serving(rung.store, num_ranks) as server:
        if rung.store == "redis":
            _load_scripts(server)
        jobs = [
            Job(
                port=server.port,
                store=rung.store,
                mesh=(mesh.tensor, mesh.data, mesh.pipeline),
                ranks=(first, num_ranks, processes),
                barrier=rung.barrier,
                num_groups=num_timed,
                start=start,
                deadline_s=_DEADLINE_S,
            )
            for first in range(min(processes, num_ranks))
        ]
        begun_s, server_cpu_s, played = _play(jobs, server)
    groups = 0 if rung.barrier is None else len(megatron_groups(mesh))
    return _measured(
        begun_s, played, server_cpu_s, groups, groups if num_timed is None else num_timed
    )


def _measured(
    begun_s: float,
    played: Sequence[Played],
    server_cpu_s: float,
    num_groups: int,
    num_timed: int,
) -> Measured:
    at = {name: max(one.marks_s[name] for one in played) for name in played[0].marks_s}
    passed = at.get(GROUPS, at[JOINED])
    join_s, groups_s, ids_s = at[JOINED] - begun_s, passed - at[JOINED], at[DONE] - passed
    scale = (num_groups + 1) / (num_timed + 1)  # the world is a group too
    return Measured(
        seconds=join_s + groups_s * scale + ids_s,
        num_groups=num_groups,
        num_timed=num_timed,
        join_s=join_s,
        groups_s=groups_s,
        ids_s=ids_s,
        requests=sum(one.requests for one in played),
        server_cpu_s=server_cpu_s,
        clients_cpu_s=sum(one.cpu_s for one in played),
    )


def _play(jobs: Sequence[Job], server: Server) -> tuple[float, float, list[Played]]:
    """When they began, the server's processor time, and what each process tells."""
    with _clients(jobs) as processes:
        for process in processes:
            _line(process, "ready\n")
        before_s, begun_s = server.cpu_s(), time.monotonic()
        for process in processes:
            _tell(process, "go\n")
        played = [Played(**json.loads(_line(process))) for process in processes]
        return begun_s, server.cpu_s() - before_s, played


@contextmanager
def _clients(jobs: Sequence[Job]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = []
    try:
        for job in jobs:
            process = subprocess.Popen(
                [sys.executable, "-m", "megascale.train.bench_init.clients"],
                env=child_environment({}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            _tell(process, json.dumps(asdict(job)) + "\n")
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _line(process: subprocess.Popen[str], expected: str = "") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line or (expected and line != expected):
        process.kill()
        errors = process.communicate()[1].strip().splitlines()
        raise LaunchError(f"simulated ranks ended early: {errors[-1] if errors else line!r}")
    return line


def _load_scripts(server: Server) -> None:
    """As the first rank of a real run does for all."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for script in SCRIPTS.values():
            connection.sendall(encoded(["SCRIPT", "LOAD", script.text]))
            answer = connection.recv(4096)
            assert answer.startswith(b"$40"), answer
