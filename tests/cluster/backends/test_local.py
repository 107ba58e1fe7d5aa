"""What only the local backend has: marks, logical hosts, namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.backends import make_backend, processes
from megascale.cluster.backends.base import AgentStart, BackendError, Machine
from megascale.cluster.backends.local import LocalBackend
from megascale.cluster.backends.namespaces import free_subnet, gateway
from megascale.errors import LaunchError
from tests.cluster.backends.harness import LocalHarness, lives, wait_for, wait_until


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LocalHarness]:
    harness = LocalHarness(tmp_path)
    yield harness
    harness.backend().close()
    harness.end()


def local(start: AgentStart, **options: Any) -> LocalBackend:
    backend = make_backend("local", start, options={"grace_s": 0.5, **options})
    assert isinstance(backend, LocalBackend)
    return backend


def test_a_child_that_emptied_its_environment_goes_with_its_agent(place: LocalHarness) -> None:
    sleeper = "import subprocess,time; subprocess.Popen(['sleep','60'], env={}).pid; time.sleep(60)"
    start = replace(place.start, command=[sys.executable, "-c", sleeper])
    backend = local(start)
    (machine,) = backend.allocate(1)
    agent = int(machine.handle.split(":")[0])
    children = Path(f"/proc/{agent}/task/{agent}/children")
    wait_until(lambda: children.read_text(encoding="ascii").split(), "the child")
    (child,) = children.read_text(encoding="ascii").split()
    comm = Path(f"/proc/{child}/comm")
    wait_until(lambda: comm.read_text(encoding="ascii") == "sleep\n", "its own environment")
    backend.evict(machine.name, "a test", block=False)
    assert not lives(int(child))


def test_an_agent_that_takes_no_hint_is_killed_after_its_grace(place: LocalHarness) -> None:
    deaf = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    backend = local(replace(place.start, command=[sys.executable, "-c", deaf]), grace_s=0.6)
    (machine,) = backend.allocate(1)
    time.sleep(0.5)  # the interpreter has to come up, or the signal finds it before its handler
    began = time.monotonic()
    backend.evict(machine.name, "a test", block=False)
    assert 0.6 <= time.monotonic() - began < 3.0
    assert not lives(int(machine.handle.split(":")[0]))


def test_what_does_not_end_blocks_its_host_and_is_told(
    place: LocalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = local(place.start, hosts=1, grace_s=0.0, kill_deadline_s=0.3)
    (machine,) = backend.allocate(1)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_signal", lambda *_: None)  # as in an uninterruptible wait
        backend.evict(machine.name, "a test", block=False)
    (event,) = backend.watch()
    assert (event.name, event.kind) == (machine.name, "gone")
    assert "did not end within 0.3 s; node0 is blocked" in event.reason
    assert backend.replenish(1) == []


def test_a_pid_that_is_another_process_by_now_is_neither_adopted_nor_ended(
    place: LocalHarness,
) -> None:
    backend = local(place.start)
    (machine,) = backend.allocate(1)
    with subprocess.Popen(["sleep", "60"]) as other:
        ticks = machine.handle.split(":")[1]
        register = backend._register
        with register.held() as state:
            state.machines[machine.name].handle = f"{other.pid}:{int(ticks) - 1}"
        assert local(place.start).adopt([machine]) == []
        assert other.poll() is None
        other.kill()
    wait_until(lambda: not place.running(), "the true agent, found by its mark")


def test_an_agent_whose_driver_died_before_it_noted_the_pid_is_ended(place: LocalHarness) -> None:
    backend = local(place.start)
    first, second = backend.allocate(2)
    with backend._register.held() as state:
        state.machines[first.name].handle = ""  # the intent alone
        del state.machines[second.name]  # dropped, and the driver died before it ended it
    for machine in (first, second):
        place.said(machine.name)
    assert local(place.start).adopt([first, second]) == []
    assert place.running() == set()


def test_node1_is_not_node10(place: LocalHarness) -> None:
    backend = local(place.start, hosts=11)
    machines = {m.name: m for m in backend.allocate(11)}
    for name in machines:
        place.said(name)
    backend.evict("node1", "a test", block=False)
    assert place.running() == set(machines) - {"node1"}


def test_the_reason_says_how_the_agent_ended(place: LocalHarness) -> None:
    backend = local(replace(place.start, command=[sys.executable, "-c", "raise SystemExit(7)"]))
    (machine,) = backend.allocate(1)
    (event,) = wait_for(backend.watch, "the event")
    assert event.name == machine.name
    assert "exit code 7" in event.reason
    log = place.run_dir / "backend" / "node0.log"
    assert log.exists()


def test_the_agents_output_goes_to_its_log(place: LocalHarness) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr)"
    backend = local(replace(place.start, command=[sys.executable, "-c", program]))
    backend.allocate(1)
    log = place.run_dir / "backend" / "node0.log"
    wait_until(lambda: set(log.read_text(encoding="utf-8").split()) == {"out", "err"}, "output")


def test_a_command_that_does_not_exist_starts_nothing(place: LocalHarness) -> None:
    backend = local(replace(place.start, command=["/no/such/agent"]))
    with pytest.raises(BackendError, match="'/no/such/agent' did not start: No such file"):
        backend.allocate(2)
    assert backend.watch() == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lokal", {}, r"unknown backend 'lokal'; known: local"),
        ("local", {"host": 3}, r"unknown key 'host'; did you mean 'hosts'"),
        ("local", {"hosts": 0}, r"local.hosts: Input should be greater than or equal to 1"),
        ("local", {"hosts": 300, "namespaces": True}, r"with namespaces at most 250"),
        ("local", {"namespaces": True}, r"do not reach http://127.0.0.1:1; let the driver listen"),
        ("local", {"namespaces": True, "subnet": "8.8.8.0/24"}, r"must be private and /24"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    place: LocalHarness, name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(LaunchError, match=words):
        make_backend(name, place.start, options=options)


def test_a_register_that_is_none_is_refused(place: LocalHarness) -> None:
    backend = local(place.start)
    path = place.run_dir / "backend" / "local.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(BackendError, match=r"local\.json is no register of version 1"):
        backend.allocate(1)
    path.unlink()


def test_partition_without_namespaces_is_refused(place: LocalHarness) -> None:
    backend = local(place.start)
    backend.allocate(1)
    with pytest.raises(BackendError, match="needs the local backend's option namespaces = true"):
        backend.partition("node0", down=True)


def test_namespaces_need_root(place: LocalHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    start = replace(place.start, driver_url="http://10.213.0.1:1")
    with pytest.raises(BackendError, match="needs root, this is user 1000"):
        local(start, namespaces=True)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)
def test_a_partitioned_host_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    subnet = free_subnet()
    bridge = "ms213-" + subnet.split(".")[2]
    start = replace(LocalHarness(tmp_path).start, driver_url=f"http://{gateway(subnet)}:1")
    backend = local(start, namespaces=True, subnet=subnet, hosts=3)
    machines = backend.allocate(2)
    try:
        with socket.create_server((gateway(subnet), 0)) as server:
            threading.Thread(target=accept_all, args=(server,), daemon=True).start()
            port = server.getsockname()[1]
            driver = (gateway(subnet), port)
            assert [reaches(m, driver, bridge) for m in machines] == [True, True]
            backend.partition(machines[0].name, down=True)
            assert [reaches(m, driver, bridge) for m in machines] == [False, True]
            assert lives(int(machines[0].handle.split(":")[0])), "cut off, not ended"
            backend.partition(machines[0].name, down=False)
            wait_until(lambda: reaches(machines[0], driver, bridge), "the link")
            backend.evict(machines[1].name, "a test", block=True)
            assert len(list(Path("/run/netns").glob(f"{bridge}-*"))) == 1

            after = local(start, namespaces=True, subnet=subnet, hosts=3)
            assert after.adopt(machines) == machines[:1]
            (more,) = after.replenish(2)
            assert reaches(more, driver, bridge)
    finally:
        local(start, namespaces=True, subnet=subnet, hosts=3).close()
    assert list(Path("/run/netns").glob(f"{bridge}-*")) == []
    assert list(Path("/sys/class/net").glob(f"{bridge}*")) == []


def accept_all(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def reaches(machine: Machine, driver: tuple[str, int], bridge: str) -> bool:
    """A connection from inside the machine's namespace to the driver's address."""
    space = f"{bridge}-{machine.host.removeprefix('node')}"
    program = f"import socket; socket.create_connection({driver!r}, timeout=1)"
    command = ["ip", "netns", "exec", space, sys.executable, "-S", "-c", program]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
