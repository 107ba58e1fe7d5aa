"""Agents as coroutines: a connection for heartbeats and one for commands each, HTTP/1.1 kept alive.

A heartbeat's latency counts from the moment at which it was due, so that one that had to wait
behind a slow one is as late as it is. Ranks fail as `fail` says, and their node beats at once, as a
real one does (`agent/heartbeat.py`), all nodes in the same moment.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from megascale.cluster.messages import TEXT

Way = Literal["", "peer lost", "storm", "first"]
CONNECT_AT_ONCE = 64
FIRST = "the first error of the job"
_LINE = "E" * (TEXT - 40)  # as long as a message may be, and different from rank to rank


@dataclass
class Seen:
    """What all agents saw; times are of this process's monotonic clock."""

    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    started_s: list[float] = field(default_factory=list)
    stopped_s: list[float] = field(default_factory=list)


class Connection:
    """Requests in turn, on one socket."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._address = host, port
        self._head = f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def call(self, method: str, path: str, body: bytes = b"") -> Any:
        """The answer's JSON. Raises RuntimeError for any status but 200."""
        head = f"{method} {path} HTTP/1.1\r\n{self._head}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + body)
        status = await self._reader.readline()
        length = 0
        while (line := await self._reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        answer = await self._reader.readexactly(length)
        if b" 200 " not in status:
            raise RuntimeError(f"{method} {path}: {status!r} {answer[:200]!r}")
        return json.loads(answer)

    def close(self) -> None:
        self._writer.close()


class Agent:
    """One node. Its ranks are wherever the clock says, until they fail: a peer was lost, or all of
    them print errors, one of them the first. Those of the next epoch are well."""

    def __init__(self, number: int, ranks: int, seen: Seen, connect: tuple[str, int, str]) -> None:
        self.name, self.num_ranks, self.seen = f"n{number}", ranks, seen
        self._way: Way = ""
        self._soon = asyncio.Event()
        self._beats, self._commands = Connection(*connect), Connection(*connect)
        self._epoch = self._sequence = self._done = 0
        self._first_rank: int | None = None
        self._started_s = 0.0
        self._said: int | None = None

    def fail(self, way: Way) -> None:
        self._way = way
        self._soon.set()

    async def join(self, gate: asyncio.Semaphore) -> None:
        async with gate:
            await self._beats.open()
            await self._commands.open()
            facts = {"host": self.name, "ip": "127.0.0.1", "num_cpus": 1, "memory_bytes": 1}
            message = {
                "node": self.name,
                "incarnation": f"{self.name}-1",
                "epoch": 0,
                "unix_ns": time.time_ns(),
                "facts": facts,
            }
            joined = await self._beats.call("POST", "/v1/join", json.dumps(message).encode())
            self._epoch = joined["epoch"]

    async def obey(self) -> None:
        """The long poll."""
        query = f"node={self.name}&incarnation={self.name}-1"
        while True:
            path = f"/v1/commands?{query}&after={self._done}"
            for command in await self._commands.call("GET", path):
                self._epoch, self._done = command["epoch"], command["sequence"]
                order = command["order"]
                if order["kind"] == "start":
                    self._first_rank = order["ranks"][0]["rank"]
                    self._started_s, self._said, self._way = time.monotonic(), None, ""
                    self.seen.started_s.append(time.monotonic())
                elif order["kind"] == "stop":
                    self._first_rank = None
                    self.seen.stopped_s.append(time.monotonic())
                result = {
                    "node": self.name,
                    "incarnation": f"{self.name}-1",
                    "epoch": self._epoch,
                    "sequence": self._done,
                    "ok": True,
                }
                await self._commands.call("POST", "/v1/results", json.dumps(result).encode())

    async def beat(self, offset_s: float) -> None:
        """Each second, `offset_s` into it, and when something happened."""
        due_s = time.monotonic() + offset_s
        while True:
            is_due = True
            try:
                await asyncio.wait_for(self._soon.wait(), max(0.0, due_s - time.monotonic()))
                is_due = False
            except TimeoutError:
                pass
            self._soon.clear()
            try:
                await self._beats.call("POST", "/v1/heartbeat", self._heartbeat())
            except (RuntimeError, OSError, asyncio.IncompleteReadError) as error:
                self.seen.failures.append(str(error))
                return
            if is_due:
                self.seen.latencies_s.append(time.monotonic() - due_s)
                due_s += 1.0

    def _heartbeat(self) -> bytes:
        self._sequence += 1
        ranks = [] if self._first_rank is None else [self._rank(i) for i in range(self.num_ranks)]
        message = {
            "node": self.name,
            "incarnation": f"{self.name}-1",
            "epoch": self._epoch,
            "sequence": self._sequence,
            "unix_ns": time.time_ns(),
            "done": self._done,
            "ranks": ranks,
        }
        if ranks and self._way == "storm":
            message["log"] = [self._line(rank["rank"]) for rank in ranks]
        return json.dumps(message).encode()

    @staticmethod
    def _line(rank: int) -> dict[str, Any]:
        line = f"rank {rank}: {_LINE}"
        return {"rule": "exception", "rank": rank, "line": line, "unix_ns": time.time_ns()}

    def _rank(self, local_rank: int) -> dict[str, Any]:
        """A rank that finishes a step a second."""
        assert self._first_rank is not None
        step = 1 + int(time.monotonic() - self._started_s)
        report: dict[str, Any] = {
            "rank": self._first_rank + local_rank,
            "local_rank": local_rank,
            "pid": 1000 + local_rank,
            "epoch": self._epoch,
            "state": "running",
            "os_state": "R",
            "uptime_s": time.monotonic() - self._started_s,
            "rss_bytes": 1 << 30,
        }
        if self._way and (self._way != "first" or local_rank == 0):
            told = {
                "peer lost": ("network", "peer closed"),
                "storm": ("network", f"rank {report['rank']}: {_LINE}"),
                "first": ("out_of_memory", FIRST),
            }
            kind, message = told[self._way]
            failure = {"kind": kind, "message": message, "unix_ns": time.time_ns()}
            return {**report, "state": "exited", "exit_code": 1, "failure": failure}
        report["progress"] = {
            "epoch": self._epoch,
            "step": step,
            "phase": "forward",
            "age_s": 0.1,
            "micro_batch": 3,
            "group_id": 1234567,
            "seq": 40 * step,
            "completed_step": step - 1,
            "completed_phase": "optimizer",
        }
        if self._said != step:
            phases = {"forward": 300_000_000, "backward": 600_000_000, "optimizer": 90_000_000}
            report["steps"] = [{"step": step, "total_ns": 1_000_000_000, "phases": phases}]
            if local_rank == self.num_ranks - 1:
                self._said = step
        return report

    def close(self) -> None:
        self._beats.close()
        self._commands.close()


async def join_all(agents: list[Agent]) -> None:
    gate = asyncio.Semaphore(CONNECT_AT_ONCE)
    await asyncio.gather(*(agent.join(gate) for agent in agents))
