"""The streamer beside the ranks: with a queue only, for the ranks here, again if it dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.cluster.agent import stream_child
from megascale.cluster.agent.stream_child import StreamChild, queue_of
from megascale.cluster.messages import Leave
from tests.cluster.agent.conftest import Ordered, StartAgent
from tests.cluster.agent.fake_driver import FakeDriver
from tests.telemetry.path.servers import BINARY, RedisServer
from tests.telemetry.path.writers import rows_of_files, rows_of_store

WAIT_S = 10.0
SAYS_ARGUMENTS = """
import json, os, signal, sys, time
print(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:]}), flush=True)
time.sleep(60)
"""
RECORDS = """
import os, time
from pathlib import Path
from megascale.telemetry.writer import line_file
from tests.telemetry.path.writers import header, step_lines
from megascale.events import to_line
rank = int(os.environ["RANK"])
with line_file(Path(os.environ["TEST_FOLDER"]), rank).open("a") as file:
    file.write(to_line(header(rank, 2)))
    for step in range(100):
        file.write(step_lines(rank, step, spans=1))
        file.flush()
        time.sleep(0.01)
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamChild]:
    for name, value in {"LOOK_S": 0.02, "AGAIN_S": 0.1, "STOPPED_S": 0.2}.items():
        monkeypatch.setattr(stream_child, name, value)
    child = StreamChild("n0", [sys.executable, "-S", "-c", SAYS_ARGUMENTS])
    child.start()
    yield child
    child.end(WAIT_S)
    assert not child.is_alive()


def configure(run_dir: Path, queue: str) -> None:
    (run_dir / "telemetry").mkdir(exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps({"telemetry": {"queue": queue}}))


def children(run_dir: Path, count: int) -> list[tuple[int, list[str]]]:
    """(pid, arguments) of the `count` that were started so far."""
    log, said = run_dir / "logs" / "stream-n0.log", list[dict[str, object]]()
    until_s = time.monotonic() + WAIT_S
    while len(said) < count and time.monotonic() < until_s:
        time.sleep(0.02)
        said = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    assert len(said) == count, said
    return [(int(str(one["pid"])), list(map(str, one["argv"]))) for one in said]  # type: ignore[call-overload]


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.full
def test_without_a_queue_nothing_runs(child: StreamChild, tmp_path: Path) -> None:
    child.started(tmp_path, [0, 1])
    time.sleep(0.2)
    configure(tmp_path, "")
    time.sleep(0.2)
    assert not (tmp_path / "logs").exists()
    configure(tmp_path, "redis://here:1/run")
    ((_, arguments),) = children(tmp_path, 1)
    assert arguments == [str(tmp_path), "--ranks", "0,1"]


@pytest.mark.full
def test_what_died_is_started_again(child: StreamChild, tmp_path: Path) -> None:
    configure(tmp_path, "redis://here:1/run")
    child.started(tmp_path, [5])
    ((pid, arguments),) = children(tmp_path, 1)
    assert arguments[-2:] == ["5", "--no-store"]
    assert os.getpriority(os.PRIO_PROCESS, pid) >= stream_child.NICE
    for count in (2, 3):
        os.kill(pid, signal.SIGKILL)
        pid, again = children(tmp_path, count)[-1]
        assert again == arguments


@pytest.mark.full
def test_rank_0_takes_the_store_along(child: StreamChild, tmp_path: Path) -> None:
    configure(tmp_path, "redis://here:1/run")
    child.started(tmp_path, [0])
    children(tmp_path, 1)
    child.stopped()
    child.started(tmp_path, [0])  # the same again: the child stays
    time.sleep(0.4)
    children(tmp_path, 1)
    child.stopped()
    assert children(tmp_path, 2)[-1][1][-2:] == ["0", "--no-store"]
    child.started(tmp_path, [3])
    assert children(tmp_path, 3)[-1][1][-2:] == ["0,3", "--no-store"]


def test_what_the_configuration_says(tmp_path: Path) -> None:
    assert queue_of(tmp_path) == ""
    for text in ("", "{", "[]", "{}", '{"telemetry": 3}'):
        (tmp_path / "config.json").write_text(text)
        assert queue_of(tmp_path) == ""
    configure(tmp_path, "kafka://a:1/b")
    assert queue_of(tmp_path) == "kafka://a:1/b"


@pytest.mark.full
@pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")
def test_an_agent_streams_and_stores_what_its_ranks_record(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        configure(tmp_path, server.url)
        agent = start_agent()
        assert driver.result_of(driver.order(ordered(RECORDS, num_ranks=2))).ok
        for rank in (0, 1):
            assert driver.rank(rank, state="exited").exit_code == 0
        folder = tmp_path / "telemetry" / "store"
        _until(lambda: bool(rows_of_store(folder)))
        assert driver.result_of(driver.order(Leave())).ok
        assert agent.wait(20) == 0
        assert rows_of_store(folder) == rows_of_files(tmp_path)
