"""Streamer, store and queue are killed at random while ranks write: in the end the store has
every event of the files once."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

from megascale.telemetry.store.segments import store_folder
from tests.telemetry.path.servers import BINARY, RedisServer
from tests.telemetry.path.writers import (
    Writers,
    rows_of_files,
    rows_of_store,
    wait_until_stored,
)

NUM_RANKS = 6
STORED_WITHIN_S = 20.0


class Part:
    """`megascale stream` with these options, as a process that can be killed and started again."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self._command = [sys.executable, "-m", "megascale", "stream", str(run_dir), *options]
        self._log = run_dir / f"stream{'-'.join(o for o in options if '/' not in o)}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        """By SIGKILL; it must have been alive."""
        assert self._process is not None
        ended = self._process.poll()
        self._process.kill()
        self._process.wait(10.0)
        assert ended is None, f"{self._command} ended with {ended}:\n{self._log.read_text()}"

    def end(self) -> str:
        """In order; what it said."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(20.0) == 0, self._log.read_text()
        return self._log.read_text()

    def __enter__(self) -> Part:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10.0)


def check(run_dir: Path) -> None:
    wait_until_stored(run_dir, STORED_WITHIN_S)
    expected, stored = rows_of_files(run_dir), rows_of_store(store_folder(run_dir))
    assert sum(expected.values()) > 100
    assert not expected - stored, f"lost: {list(expected - stored)[:5]}"
    assert not stored - expected, f"doubled or wrong: {list(stored - expected)[:5]}"


def kill_one_process(run_dir: Path, seed: int, kills: int) -> None:
    """Streamer and store as one process, the queue in its memory."""
    random_ = random.Random(seed)
    writers = Writers(run_dir, NUM_RANKS, random.Random(seed))
    writers.start()
    with Part(run_dir) as part:
        for _ in range(kills):
            writers.join(random_.uniform(0.6, 2.0))
            part.kill()
            part.start()
        writers.join(0.3)
        writers.end()
        check(run_dir)
        assert "MB streamed" in part.end()
    check(run_dir)


def kill_anything(
    folder: Path, seed: int, victims: list[str], *, appends: bool, pause_s: tuple[float, float]
) -> None:
    """Streamer, store and redis-server as processes of their own."""
    run_dir = folder / "run"
    random_ = random.Random(seed)
    writers = Writers(run_dir, NUM_RANKS, random.Random(seed))
    writers.start()
    with (
        RedisServer(folder, appends=appends) as server,
        Part(run_dir, "--queue", server.url, "--no-store") as streamer,
        Part(run_dir, "--queue", server.url, "--no-files") as store,
    ):
        parts: dict[str, Part | RedisServer] = {
            "streamer": streamer,
            "store": store,
            "server": server,
        }
        for victim in victims:
            writers.join(random_.uniform(*pause_s))
            parts[victim].kill()
            writers.join(random_.uniform(0.0, 0.3))
            parts[victim].start()
        writers.end()
        check(run_dir)


@pytest.mark.full
def test_a_process_killed_twice_loses_and_doubles_nothing(tmp_path: Path) -> None:
    kill_one_process(tmp_path, seed=1, kills=2)


@pytest.mark.full
@pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")
@pytest.mark.parametrize("appends", [False, True], ids=["empty server", "server with old data"])
def test_all_parts_killed_lose_and_double_nothing(tmp_path: Path, appends: bool) -> None:
    kill_anything(tmp_path, 2, ["store", "server", "streamer"], appends=appends, pause_s=(0.4, 1.2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 120))
def test_campaign(tmp_path: Path, seed: int) -> None:
    victims = random.Random(seed).choices(["store", "server", "streamer"], k=8)
    kill_anything(tmp_path, seed, victims, appends=seed % 2 == 0, pause_s=(0.1, 3.0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(200, 220))
def test_campaign_of_one_process(tmp_path: Path, seed: int) -> None:
    kill_one_process(tmp_path, seed, kills=6)
