"""Agents without processes that speak real HTTP, and a backend that has machines on paper."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from megascale.cluster.backends.base import BackendError, Machine, MachineEvent
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.session import Job, Started, start
from megascale.cluster.people import Status
from megascale.cluster.transitions import Policy


@dataclass
class PaperBackend:
    """Machines are names; what became of them is remembered."""

    hosts: int = 4
    given: list[str] = field(default_factory=list)
    evicted: list[tuple[str, bool]] = field(default_factory=list)
    events: list[MachineEvent] = field(default_factory=list)
    closed: bool = False
    adopt_s: float = 0.0  # beside a process that does not end
    on_give: Callable[[str], None] = lambda _name: None

    def allocate(self, count: int, *, exclude: Sequence[str] = ()) -> list[Machine]:
        if count > self.hosts - len(self.given):
            raise BackendError(f"{count} machines asked for, {self.hosts} there")
        return self.replenish(count, exclude=exclude)

    def replenish(
        self, count: int, *, exclude: Sequence[str] = (), near: Sequence[str] = ()
    ) -> list[Machine]:
        free = [f"n{i}" for i in range(self.hosts)]
        chosen = [n for n in free if n not in self.given and f"host-{n}" not in exclude][:count]
        self.given += chosen
        for name in chosen:
            self.on_give(name)
        return [Machine(name, f"host-{name}") for name in chosen]

    def evict(self, name: str, reason: str, *, block: bool) -> None:
        self.evicted.append((name, block))

    def watch(self) -> list[MachineEvent]:
        events, self.events = self.events, []
        return events

    def adopt(self, machines: Sequence[Machine]) -> list[Machine]:
        time.sleep(self.adopt_s)
        return list(machines)

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeRank:
    rank: int
    epoch: int
    step: int = 0
    state: str = "running"
    exit_code: int | None = None
    failure: dict[str, Any] | None = None
    stuck: bool = False
    age_s: float = 0.0

    def report(self, procs: int) -> dict[str, Any]:
        report: dict[str, Any] = {
            "rank": self.rank,
            "local_rank": self.rank % procs,
            "pid": 1000 + self.rank,
            "epoch": self.epoch,
            "state": self.state,
            "uptime_s": 1.0,
            "progress": {
                "epoch": self.epoch,
                "step": self.step + 1,
                "phase": "forward",
                "age_s": self.age_s,
            },
        }
        if self.exit_code is not None:
            report["exit_code"] = self.exit_code
        if self.failure is not None:
            report["failure"] = {"unix_ns": 1, **self.failure}
        return report


class FakeAgent:
    """Obeys; its ranks do a step a heartbeat. Everything about it may be changed from the test."""

    def __init__(self, name: str, url: str, token: str, interval_s: float = 0.1) -> None:
        self.name, self.url, self.interval_s = name, url, interval_s
        self.incarnation = f"i-{name}-{time.monotonic_ns()}"
        self.headers = {"Authorization": f"Bearer {token}"}
        self.ranks: list[FakeRank] = []
        self.obeyed: list[dict[str, Any]] = []
        self.joins = 0
        self.epoch = 0
        self.silent = False
        self.left = False
        self.last_step = 10**9
        self.first_step: Callable[[], int] = lambda: 0
        self.extra: dict[str, Any] = {}
        self.check_ok = True

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=4)
        async with httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=30.0, trust_env=False, limits=limits
        ) as client:
            await asyncio.gather(self._beats(client), self._orders(client))

    async def _beats(self, client: httpx.AsyncClient) -> None:
        sequence, joined = 0, False
        while not self.left:
            if not self.silent:
                with suppress(httpx.HTTPError):
                    joined = await (self._beat(client, sequence) if joined else self._join(client))
            sequence += 1
            self._step()
            await asyncio.sleep(self.interval_s)

    async def _join(self, client: httpx.AsyncClient) -> bool:
        answer = await client.post(
            "/v1/join",
            json={
                "node": self.name,
                "incarnation": self.incarnation,
                "epoch": self.epoch,
                "unix_ns": 1,
                "facts": {
                    "host": f"host-{self.name}",
                    "ip": "127.0.0.1",
                    "num_cpus": 2,
                    "memory_bytes": 1,
                },
                "ranks": self._reports(),
            },
        )
        if answer.status_code == 403:
            self.left = True
        if answer.status_code != 200:
            return False
        self.joins += 1
        self.epoch = max(self.epoch, answer.json()["epoch"])
        return True

    async def _beat(self, client: httpx.AsyncClient, sequence: int) -> bool:
        extra, self.extra = self.extra, {}
        answer = await client.post(
            "/v1/heartbeat",
            json={
                "node": self.name,
                "incarnation": self.incarnation,
                "epoch": self.epoch,
                "sequence": sequence,
                "unix_ns": 1,
                "ranks": self._reports(),
                **extra,
            },
        )
        assert answer.status_code != 422, answer.text
        if answer.status_code != 200:
            return True
        heard = answer.json()
        self.epoch = max(self.epoch, heard["epoch"])
        self.left |= heard["leave"]
        return bool(heard["known"])

    async def _orders(self, client: httpx.AsyncClient) -> None:
        after = 0
        while not self.left:
            query: dict[str, Any] = {
                "node": self.name,
                "incarnation": self.incarnation,
                "after": after,
            }
            try:
                answer = await client.get("/v1/commands", params={**query, "wait_s": 1.0})
                commands = answer.json() if answer.status_code == 200 else []
            except httpx.HTTPError:
                commands = []
            if not commands:
                await asyncio.sleep(0.02)
            for command in commands:
                if command["sequence"] > after:
                    after = command["sequence"]
                    await self._obey(client, command)

    async def _obey(self, client: httpx.AsyncClient, command: dict[str, Any]) -> None:
        order = command["order"]
        self.obeyed.append({**order, "epoch": command["epoch"]})
        ok = True
        detail: dict[str, Any] = {}
        self.epoch = max(self.epoch, command["epoch"])
        if order["kind"] == "start":
            step = self.first_step()
            self.ranks = [FakeRank(r["rank"], command["epoch"], step) for r in order["ranks"]]
        elif order["kind"] == "stop":
            self.ranks = []
        elif order["kind"] == "selfcheck":
            ok, detail = self.check_ok, {"checks": [{"name": "memory", "ok": self.check_ok}]}
        elif order["kind"] == "dump":
            detail = {"stacks": {str(r.rank): "" for r in self.ranks}}
        result = {
            "node": self.name,
            "incarnation": self.incarnation,
            "epoch": command["epoch"],
            "sequence": command["sequence"],
            "ok": ok,
            "detail": detail,
        }
        with suppress(httpx.HTTPError):
            await client.post("/v1/results", json=result)
        self.left |= order["kind"] == "leave"

    def _reports(self) -> list[dict[str, Any]]:
        return [rank.report(max(1, len(self.ranks))) for rank in self.ranks]

    def _step(self) -> None:
        for rank in self.ranks:
            if rank.stuck:
                rank.age_s += self.interval_s
            elif rank.state == "running":
                rank.step += 1
                if rank.step >= self.last_step:
                    rank.state, rank.exit_code = "exited", 0


class Agents:
    """In a thread with a loop of its own; `add` starts one more."""

    def __init__(self) -> None:
        self.by_name: dict[str, FakeAgent] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: list[Any] = []

    def add(self, agent: FakeAgent) -> FakeAgent:
        self.by_name[agent.name] = agent
        self._tasks.append(asyncio.run_coroutine_threadsafe(agent.run(), self._loop))
        return agent

    def until_left(self, *names: str) -> None:
        deadline_s = time.monotonic() + 10.0
        while not all(self[name].left for name in names):
            assert time.monotonic() < deadline_s, names
            time.sleep(0.01)

    def __getitem__(self, name: str) -> FakeAgent:
        return self.by_name[name]

    def close(self) -> None:
        for agent in self.by_name.values():
            agent.left = True
        for task in self._tasks:
            task.cancel()
        time.sleep(0.05)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()


class Cluster:
    """A driver in this process, on loopback, with fake agents that its backend starts."""

    def __init__(self, tmp_path: Path, policy: Policy, hosts: int = 4) -> None:
        self.run_dir = tmp_path
        self.backend = PaperBackend(hosts, on_give=self._give)
        self.agents = Agents()
        self.configure: Callable[[FakeAgent], None] = lambda _agent: None
        self.job = Job(Program(tmp_path, ("train",)), policy)
        self.started: Started = start(self.job, backend=self.backend)
        self.token = self.started.token_file.read_text().strip()
        self.url = self.started.server.url
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, trust_env=False
        )

    def _run(self) -> None:
        self.code = self.started.driver.run()

    def _give(self, name: str) -> None:
        agent = FakeAgent(name, self.url, self.token)
        self.configure(agent)
        self.agents.add(agent)

    def run(self) -> None:
        self._thread.start()

    def status(self) -> Status:
        return Status.model_validate_json(self.client.get("/v1/status").content)

    def until(self, what: Callable[[Status], bool], timeout_s: float = 20.0) -> Status:
        """The first status for which `what` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not what(status := self.status()):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.02)
        return status

    def until_trains(self, epoch: int = 1, step: int = 2) -> Status:
        return self.until(
            lambda s: s.phase == "training" and s.epoch >= epoch and (s.epoch_step or 0) >= step
        )

    def end(self, timeout_s: float = 20.0) -> int:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), self.status()
        assert self.code is not None
        return self.code

    def close(self) -> None:
        if self._thread.is_alive():
            self.started.driver.stop()
            self._thread.join(20.0)
        self.agents.close()
        self.client.close()
        self.started.server.close()


@contextmanager
def cluster(tmp_path: Path, policy: Policy, hosts: int = 4) -> Iterator[Cluster]:
    made = Cluster(tmp_path, policy, hosts)
    try:
        yield made
    finally:
        made.close()
