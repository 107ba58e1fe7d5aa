"""What the contract suite needs of each backend: a place where it runs, and eyes outside of it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from megascale.cluster.backends import make_backend
from megascale.cluster.backends.base import AgentStart, Backend, Machine

T = TypeVar("T")
STUB = Path(__file__).with_name("stub_agent.py")
TOKEN = "a token of the test"


class Harness:
    """A place with six hosts, three under each of two switches."""

    name = ""
    hosts = 6

    def __init__(self, run_dir: Path, options: Mapping[str, Any]) -> None:
        self.run_dir = run_dir
        self.options = dict(options)
        token = run_dir / "token"
        token.write_text(TOKEN, encoding="utf-8")
        token.chmod(0o600)
        self.start = AgentStart(
            command=[sys.executable, str(STUB)],
            driver_url="http://127.0.0.1:1",
            token_file=str(token),
            run_dir=str(run_dir),
        )

    def backend(self) -> Backend:
        """A backend as a driver makes one when it starts, for the first time or again."""
        return make_backend(self.name, self.start, options=self.options)

    def said(self, name: str) -> dict[str, Any]:
        path = self.run_dir / "stub" / f"{name}.json"
        wait_until(path.exists, f"agent {name} to start")
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return said

    def running(self) -> set[str]:
        """Names of the agents of which a process lives, be it but the child."""
        paths = (self.run_dir / "stub").glob("*.json")
        said = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
        return {n for n, what in said.items() if lives(what["pid"]) or lives(what["child"])}

    def kill(self, machine: Machine) -> None:
        """Let the agent's process end, unasked."""
        os.kill(self.said(machine.name)["pid"], signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """What a closed backend should have removed, beside processes."""
        return []

    def end(self) -> None:
        """Whatever the test did, no process of it stays."""
        for name in self.running():
            for pid in (self.said(name)["pid"], self.said(name)["child"]):
                if lives(pid):
                    os.kill(pid, signal.SIGKILL)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("STUB_OF") == str(self.run_dir):
                    process.kill()


class LocalHarness(Harness):
    name = "local"

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, {"hosts": self.hosts, "hosts_per_switch": 3, "grace_s": 2.0})


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(look: Callable[[], list[T]], what: str, *, seconds: float = 40.0) -> list[T]:
    """What `look` returns as soon as that is not empty."""
    found: list[T] = []

    def looked() -> bool:
        found.extend(look())
        return bool(found)

    wait_until(looked, what, seconds=seconds)
    return found


def wait_until(ready: Callable[[], object], what: str, *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
