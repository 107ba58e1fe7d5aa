"""Shared memory of an agent that died together with its watchdog is taken away by the next."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.cluster.agent import page_folders
from megascale.cluster.agent.proc import all_stats
from tests.cluster.agent.conftest import Ordered, StartAgent
from tests.cluster.agent.fake_driver import FakeDriver
from tests.cluster.agent.programs import SLEEPS

OWNS = """
import sys, time
from pathlib import Path
from megascale.cluster.agent import page_folders
held = page_folders.make(Path(sys.argv[1]))
print("owns", flush=True)
time.sleep(600)
"""


def until(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """Starts a process that makes a folder its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", OWNS, str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"owns\n"
        (folder / "slots-000").write_bytes(b"x")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_folder_stays_as_long_as_its_owner_lives(
    tmp_path: Path, owner: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    living, dying = tmp_path / "megascale-a-1", tmp_path / "megascale-b-2"
    owner(living)
    process = owner(dying)
    assert page_folders.clear_dead(tmp_path) == []
    process.kill()
    process.wait()
    assert page_folders.clear_dead(tmp_path) == [dying]
    assert (living / "slots-000").exists()
    assert not dying.exists()


def test_what_has_no_owner_or_another_name_is_not_ours_to_take(tmp_path: Path) -> None:
    for name in ("megascale-old-1", "somebody-2"):
        (tmp_path / name).mkdir()
    (tmp_path / "somebody-2" / page_folders.OWNER).touch()
    assert page_folders.clear_dead(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2


def test_a_machine_that_is_given_up_leaves_no_pages(
    tmp_path: Path,
    owner: Callable[[Path], subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megascale.cluster.backends.base import AgentStart
    from megascale.cluster.backends.local import LocalBackend

    monkeypatch.setattr(page_folders, "SHARED_MEMORY", tmp_path)
    folder = tmp_path / f"megascale-{secrets.token_hex(4)}-1"
    code = f"{OWNS.replace('sys.argv[1]', repr(str(folder)))}"
    start = AgentStart((sys.executable, "-c", code), "http://127.0.0.1:1", "token", str(tmp_path))
    backend = LocalBackend(start, {"grace_s": 0.0})
    (machine,) = backend.allocate(1)
    until((folder / page_folders.OWNER).exists)
    backend.evict(machine.name, "a test", block=False)
    assert not folder.exists()
    backend.close()


@pytest.mark.full
def test_the_next_agent_of_the_host_clears_what_a_dead_one_and_its_watchdog_left(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    (rank,) = [s for s in all_stats().values() if s.parent == agent.pid and "rank" in _words(s.pid)]
    environ = Path(f"/proc/{rank.pid}/environ").read_bytes().split(b"\0")
    page = next(item for item in environ if item.startswith(b"MEGASCALE_PROGRESS_PAGE="))
    folder = Path(os.fsdecode(page.partition(b"=")[2])).parent
    assert folder.is_relative_to(page_folders.SHARED_MEMORY)
    family = [s.pid for s in all_stats().values() if s.parent == agent.pid]
    for pid in (agent.pid, *family):
        os.kill(pid, signal.SIGSTOP)  # so that none sees another's end
    for pid in (*family, agent.pid):
        os.kill(pid, signal.SIGKILL)
    agent.wait()
    assert folder.exists()
    start_agent(node="n7")
    until(lambda: not folder.exists())


def _words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
