"""Thousands of simulated ranks in one process: a connection each, multiplexed by epoll.

    python -m megascale.train.bench_init.clients   < a job as one line of JSON, then a line "go"

It connects nothing before the line "go", so that several such processes begin together, and prints
one line of JSON: when the last of its ranks came by each mark (seconds of the monotonic clock,
which all processes of a machine share), how many requests it sent, and what processor time it took.

Every rank is one generator (`calls.py`), so it has one request under way and sends the next when
the answer is there. The loop does as little as it can: what it takes is taken from the server where
both share a core, and rows tell the processor time of both.
"""

from __future__ import annotations

import heapq
import json
import select
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megascale.topology import Mesh
from megascale.train.bench_init.calls import Calls, Mark, Pause, Reader, Steps
from megascale.train.bench_init.redis_calls import RedisCalls
from megascale.train.bench_init.sequences import Barrier, EveryGroup, OwnGroups
from megascale.train.bench_init.tcp_calls import TcpCalls

_MOST_EVENTS = 512
_READ_BYTES = 65536
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


@dataclass(frozen=True)
class Job:
    """What one process plays: the ranks of `ranks` (first, behind the last, step).

    barrier     of every group; None: ordered creation
    num_groups  of the first so many groups; None: of all
    """

    port: int
    store: str
    mesh: tuple[int, int, int]
    ranks: tuple[int, int, int]
    barrier: Barrier | None
    num_groups: int | None
    start: str
    deadline_s: float


@dataclass
class Played:
    """marks_s  when the last rank came by, on the monotonic clock"""

    marks_s: dict[str, float]
    requests: int
    cpu_s: float


class _Rank:
    """One simulated rank and what it waits for."""

    __slots__ = ("buffer", "is_done", "number", "read", "socket", "steps")

    def __init__(self, number: int, steps: Steps) -> None:
        self.number, self.steps = number, steps
        self.socket = socket.socket()
        self.buffer = b""
        self.read: Reader | None = None
        self.is_done = False


class Clients:
    """Plays ranks against the server on `port` of this machine until all are done. A context."""

    def __init__(self, port: int, programs: Iterable[tuple[int, Steps]]) -> None:
        self._port = port
        self._ranks = [_Rank(number, steps) for number, steps in programs]
        self._by_fd = {rank.socket.fileno(): rank for rank in self._ranks}
        self._poll = select.epoll(len(self._ranks) + 1)
        self._asleep: list[tuple[float, int, _Rank]] = []
        self._left = len(self._ranks)
        self.marks_s: dict[str, float] = {}
        self.requests = 0

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.socket.close()
        self._poll.close()

    def play(self, deadline_s: float) -> None:
        """Raises TimeoutError naming ranks that are not done `deadline_s` from now."""
        until_s = time.monotonic() + deadline_s
        for rank in self._ranks:
            rank.socket.setblocking(False)
            rank.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rank.socket.connect_ex(("127.0.0.1", self._port))
            self._poll.register(rank.socket.fileno(), _OUT)
        while self._left:
            now_s = time.monotonic()
            if now_s > until_s:
                waiting = [rank.number for rank in self._ranks if not rank.is_done]
                raise TimeoutError(
                    f"not done after {deadline_s:.0f} s: {len(waiting)} ranks, {waiting[:8]}"
                )
            self._wake(now_s)
            nap_s = self._asleep[0][0] - now_s if self._asleep else 1.0
            for fd, event in self._poll.poll(max(0.0, min(nap_s, 1.0)), _MOST_EVENTS):
                self._look(self._by_fd[fd], event)

    def _look(self, rank: _Rank, event: int) -> None:
        if event & _IN:
            data = rank.socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError(f"the server closed the connection of rank {rank.number}")
            rank.buffer = rank.buffer + data if rank.buffer else data
            self._answer(rank)
        elif event & _OUT:  # connected
            error = rank.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, f"rank {rank.number} cannot connect")
            self._poll.modify(rank.socket.fileno(), _IN)
            self._go_on(rank, None)
        else:
            raise ConnectionError(f"the connection of rank {rank.number} broke")

    def _answer(self, rank: _Rank) -> None:
        assert rank.read is not None, f"rank {rank.number} was sent {rank.buffer[:40]!r} unasked"
        found = rank.read(rank.buffer)
        if found is not None:
            value, size = found
            rank.buffer = rank.buffer[size:]
            self._go_on(rank, value)

    def _go_on(self, rank: _Rank, value: Any) -> None:
        """Let the rank run until it waits for something."""
        while True:
            try:
                step = rank.steps.send(value)
            except StopIteration:
                self._end(rank)
                return
            value = None
            if isinstance(step, Pause):
                due_s = time.monotonic() + step.seconds
                heapq.heappush(self._asleep, (due_s, rank.number, rank))
                return
            if isinstance(step, Mark):
                self.marks_s[step.name] = time.monotonic()
                continue
            self.requests += 1
            sent = rank.socket.send(step.data)
            assert sent == len(step.data), f"sent {sent} of {len(step.data)} bytes"
            rank.read = step.read
            if step.read is not None:
                return

    def _wake(self, now_s: float) -> None:
        while self._asleep and self._asleep[0][0] <= now_s:
            self._go_on(heapq.heappop(self._asleep)[2], None)

    def _end(self, rank: _Rank) -> None:
        """Its connection stays open: a real rank's does, and the server serves them all."""
        rank.read, rank.is_done = None, True
        self._left -= 1


def programs(job: Job) -> list[tuple[int, Steps]]:
    """The ranks of the job and what they do."""
    mesh = Mesh(*job.mesh)
    every = None if job.barrier is None else EveryGroup(mesh, job.barrier, job.num_groups)
    sequence = every or OwnGroups(mesh)

    def calls() -> Calls:
        return RedisCalls(job.start) if job.store == "redis" else TcpCalls()

    return [(rank, sequence.steps(calls(), rank)) for rank in range(*job.ranks)]


def main() -> None:
    job = Job(**json.loads(sys.stdin.readline()))
    with Clients(job.port, programs(job)) as clients:
        print("ready", flush=True)
        if sys.stdin.readline() != "go\n":
            return
        before_s = time.process_time()
        clients.play(job.deadline_s)
        played = Played(clients.marks_s, clients.requests, time.process_time() - before_s)
        print(json.dumps(asdict(played)), flush=True)
        sys.stdin.readline()  # until all processes are done, connections stay


if __name__ == "__main__":
    main()
