"""The driver's process: the real one, on machines that somebody else's coroutines play."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megascale.cluster.backends.base import Machine, MachineEvent
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.session import Job, start
from megascale.cluster.transitions import Policy
from megascale.config.cluster import ClusterConfig


class Played:
    """A backend whose machines are there already."""

    def __init__(self) -> None:
        self._given = 0

    def allocate(self, count: int, *, exclude: Sequence[str] = ()) -> list[Machine]:
        del exclude
        machines = [Machine(f"n{i}", f"n{i}") for i in range(self._given, self._given + count)]
        self._given += count
        return machines

    def replenish(
        self, count: int, *, exclude: Sequence[str] = (), near: Sequence[str] = ()
    ) -> list[Machine]:
        del count, exclude, near
        return []

    def evict(self, name: str, reason: str, *, block: bool) -> None:
        pass

    def watch(self) -> list[MachineEvent]:
        return []

    def adopt(self, machines: Sequence[Machine]) -> list[Machine]:
        return list(machines)

    def close(self) -> None:
        pass


def main(run_dir: str, agents: str, ranks: str) -> int:
    policy = Policy(
        num_nodes=int(agents),
        procs_per_node=int(ranks),
        cluster=ClusterConfig(selfcheck="off"),
        legal_nodes=(int(agents),),
    )
    job = Job(Program(Path(run_dir), ("train",)), policy)
    started = start(job, Played())
    print(started.server.url, started.token_file, flush=True)
    try:
        return started.driver.run()
    finally:
        started.server.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
