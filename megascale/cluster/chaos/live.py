"""The job under test, as its faults and its observer see it: a driver in a process of its own,
agents, ranks, folders. All processes are found by the mark that the local backend gave them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.cluster.agent.proc import Identity, read_stat, send
from megascale.cluster.backends import processes
from megascale.cluster.chaos.rig import Rig
from megascale.env import FAULT_ORDERS, child_environment
from megascale.errors import LaunchError
from megascale.events import ProgressReader

ANSWER_S = 5.0
END_S = 60.0  # from asking a driver to stop to ending it


@dataclass(frozen=True)
class JobSpec:
    """What is run. `folder` is the run folder; `subnet`: each host in a namespace of its own;
    `step_s`: how long a step's computation is to take (`train/pace.py`), None: its own time."""

    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    nodes: int
    procs_per_node: int
    spares: int
    subnet: str | None = None
    step_s: float | None = None
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """For `chaos/driver.py`."""
        return {
            "recipe": str(self.recipe),
            "overrides": [*self.overrides, f"job.run_dir={json.dumps(str(self.folder))}"],
            "nodes": self.nodes,
            "procs_per_node": self.procs_per_node,
            "spares": self.spares,
            "subnet": self.subnet,
        }


@dataclass(frozen=True)
class RankNow:
    """A rank's process, and where it stands by its progress page (None: not in a step yet)."""

    rank: int
    epoch: int
    identity: Identity
    node: str
    step: int | None
    phase: str | None


@dataclass
class LiveJob:
    spec: JobSpec
    rig: Rig = field(init=False)
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    ports: set[tuple[str, int]] = field(default_factory=set)
    _num_orders: int = 0

    def __post_init__(self) -> None:
        self.rig = Rig(self.spec.folder)

    # ------------------------------------------------------------ the driver

    def start_driver(self) -> subprocess.Popen[bytes]:
        """Start one, as `megascale run` would be; also where one runs already."""
        spec, folder = self.spec, self.spec.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rig.folder.mkdir(exist_ok=True)
        if spec.step_s is not None:
            self.rig.set_pace(spec.nodes, spec.procs_per_node, spec.step_s, spec.seed)
        more = {FAULT_ORDERS: str(self.rig.orders)}
        if self.spec.subnet:
            more["GLOO_SOCKET_IFNAME"] = "eth0"
        with (self.rig.folder / "driver.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "megascale.cluster.chaos.driver"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=child_environment(more),
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self.spec.arguments()).encode())
        process.stdin.close()
        self.drivers.append(process)
        return process

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        return self.drivers[-1]

    def end(self) -> int | None:
        """Ask the job to stop, wait, end by force what is left; the driver's exit code."""
        self.undo_all()
        if self.driver.poll() is None:
            status, _ = self.call("POST", "/v1/stop")
            if status != 200:
                self.driver.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.driver.wait(END_S)
        return self.driver.poll()

    def undo_all(self) -> None:
        """Thaw what is frozen, remove cgroups; what cannot be undone is told."""
        while self.undo:
            try:
                self.undo.pop()()
            except LaunchError as error:
                print(f"chaos: {error}", file=sys.stderr)

    def end_by_force(self) -> None:
        """Whatever is left of this job, also after an error of chaos itself."""
        for process in self.drivers:
            if process.poll() is None:
                process.kill()
                process.wait(10.0)
        if not self.has_machines:
            return
        deadline_s = time.monotonic() + 10.0
        while (left := self.members()) and time.monotonic() < deadline_s:
            for pids in left.values():
                for pid, ticks in pids.items():
                    send((pid, ticks), signal.SIGKILL)
            time.sleep(0.1)

    # ------------------------------------------------------------ its API

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        token: str | None = None,
    ) -> tuple[int, Any]:
        """(HTTP status, answer); status 0 where nobody answers."""
        try:
            driver = self.spec.folder / "driver"
            url = json.loads((driver / "address.json").read_text())["url"]
            token = (driver / "token").read_text().strip() if token is None else token
        except (OSError, ValueError, KeyError):
            return 0, None
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(url + path, data, headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, None
        except (OSError, ValueError):
            return 0, None

    def status(self) -> dict[str, Any] | None:
        return self.call("GET", "/v1/status")[1]

    def note_ports(self) -> None:
        """Remember where the job listens now, to look afterwards whether it still does."""
        with suppress(OSError, ValueError, KeyError):
            address = json.loads((self.spec.folder / "driver" / "address.json").read_text())
            self.ports.add((address["host"], int(address["port"])))
        if not self.has_machines:
            return
        for pid in [pid for pids in self.members().values() for pid in pids]:
            variables = _environ(pid)
            if "MASTER_PORT" in variables:
                self.ports.add((variables["MASTER_ADDR"], int(variables["MASTER_PORT"])))

    # ------------------------------------------------------------ its processes

    @property
    def has_machines(self) -> bool:
        """Whether the backend has ever had any."""
        return (self.spec.folder / "backend" / "local.json").exists()

    def register(self) -> dict[str, Any]:
        """What the backend has written down."""
        text = (self.spec.folder / "backend" / "local.json").read_text()
        found: dict[str, Any] = json.loads(text)
        return found

    def members(self) -> dict[str, dict[int, int]]:
        """By node: pid -> start of every process that belongs to it."""
        found = processes.members(f"{self.register()['job']}/")
        return {mark.split("/")[1]: pids for mark, pids in found.items()}

    def host(self, node: str) -> str:
        return str(self.register()["machines"][node]["host"])

    def agent(self, node: str) -> Identity:
        pid, _, ticks = self.register()["machines"][node]["handle"].partition(":")
        return int(pid), int(ticks)

    def lose_power(self, node: str) -> None:
        """Every process of the node ends at once, watchdog too, and its memory is gone."""
        pids, agent = self.members()[node], self.agent(node)
        for identity in [agent, *pids.items()]:
            send(identity, signal.SIGKILL)
        record = json.loads((self.spec.folder / "agents" / node / "processes.json").read_text())
        shutil.rmtree(record["pages"], ignore_errors=True)

    def ranks(self) -> dict[int, RankNow]:
        """Those of the newest epoch that has any."""
        found: dict[int, RankNow] = {}
        for node, pids in self.members().items():
            for pid, ticks in pids.items():
                stat, variables = read_stat(pid), _environ(pid)
                if stat is None or stat.session != pid or "RANK" not in variables:
                    continue
                now = _rank_now(variables, (pid, ticks), node)
                if now.rank not in found or found[now.rank].epoch < now.epoch:
                    found[now.rank] = now
        newest = max((now.epoch for now in found.values()), default=0)
        return {rank: now for rank, now in sorted(found.items()) if now.epoch == newest}

    def rank(self, rank: int) -> RankNow:
        ranks = self.ranks()
        if rank not in ranks:
            raise LaunchError(f"rank {rank} does not run now; those that do: {sorted(ranks)}")
        return ranks[rank]

    def node_of(self, node_rank: int) -> str:
        """Name of the node that holds these ranks now."""
        for node in (self.status() or {}).get("nodes", []):
            if node["node_rank"] == node_rank:
                return str(node["node"])
        raise LaunchError(f"no node has node rank {node_rank} now")

    def spare(self) -> str:
        for node in (self.status() or {}).get("nodes", []):
            if node["state"] == "spare":
                return str(node["node"])
        raise LaunchError("there is no spare now; give the schedule's job one more")

    # ------------------------------------------------------------ faults inside trainers

    def order(self, kind: str, ranks: Sequence[int], **options: Any) -> str:
        """Order a fault of the trainers (`train/faults.py`); its number."""
        self._num_orders += 1
        order = {"id": str(self._num_orders), "kind": kind, "ranks": list(ranks), **options}
        known = json.loads(self.rig.orders.read_text()) if self.rig.orders.exists() else []
        new = self.rig.orders.with_suffix(".new")
        new.write_text(json.dumps([*known, order]))
        new.replace(self.rig.orders)
        return str(order["id"])

    def happened(self, order: str) -> list[dict[str, Any]]:
        """What the ranks wrote when they obeyed, first of them first."""
        found = []
        for file in (self.rig.folder / "done").glob(f"{order}-*.json"):
            entry = json.loads(file.read_text())
            found.append({**entry, "rank": int(file.stem.split("-")[1])})
        return sorted(found, key=lambda entry: entry["monotonic_ns"])


def _rank_now(variables: Mapping[str, str], identity: Identity, node: str) -> RankNow:
    epoch = int(variables.get("MEGASCALE_EPOCH", 0))
    issued = None
    with suppress(OSError, ValueError, IndexError, KeyError):
        reader = ProgressReader(Path(variables["MEGASCALE_PROGRESS_PAGE"]))
        issued = reader.issued()
        reader.close()
    if issued is None or issued.epoch != epoch or issued.phase == "init" or issued.step < 1:
        return RankNow(int(variables["RANK"]), epoch, identity, node, None, None)
    return RankNow(int(variables["RANK"]), epoch, identity, node, issued.step, issued.phase)


def _environ(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in data.split(b"\0") if item)
    return {key: value for key, _, value in pairs}
