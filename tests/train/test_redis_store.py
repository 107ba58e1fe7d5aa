"""Runs whose ranks meet through a Redis server, as users start them: the same losses as through
TCPStore, nothing left on the server, and an error where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.telemetry.path.servers import BINARY, RedisServer
from tests.train.command import SMALL, end, flags, started, train_here, write_recipe

pytestmark = pytest.mark.full
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


def through(port: int) -> list[str]:
    return ["comm.init_store=redis", f"comm.redis_address=redis://127.0.0.1:{port}/0"]


def losses(run: Path, verb: str, *settings: str, more: tuple[str, ...]) -> list[float]:
    """Of three steps of a started program."""
    given = flags([*SMALL, "training.steps=3", f"job.run_dir={run}", *settings])
    with started([verb, str(write_recipe(run.parent)), *given, *more]) as process:
        code, output, errors = end(process, timeout_s=110)
    assert code == 0, output + errors
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def names(server: RedisServer) -> list[bytes]:
    import redis

    with redis.Redis(port=server.port) as client:
        found: list[bytes] = client.keys("*")
    return [name for name in found if b":wait:" not in name]  # those live as long as their waits


@needs_redis
def test_train(server: RedisServer, tmp_path: Path) -> None:
    layout = ("parallelism.tensor_parallel_size=2",)
    tcp = losses(tmp_path / "tcp", "train", *layout, more=("--nproc", "4"))
    for folder in ("redis", "again"):
        settings = (*layout, *through(server.port))
        assert losses(tmp_path / folder, "train", *settings, more=("--nproc", "4")) == tcp
        assert names(server) == []
    lines = [
        path.read_text().splitlines() for path in (tmp_path / "redis/telemetry").glob("*.jsonl")
    ]
    records = [json.loads(line) for of_rank in lines for line in of_rank]
    groups = [record for record in records if record.get("name") == "groups"]
    assert sorted(record["rank"] for record in groups) == [0, 1, 2, 3]
    assert all(set(record["detail"]["creation_s"]) == {"tensor", "data"} for record in groups)


@needs_redis
def test_run(server: RedisServer, tmp_path: Path) -> None:
    more = ("--nodes", "2", "--procs-per-node", "1")
    tcp = losses(tmp_path / "tcp", "run", more=more)
    assert losses(tmp_path / "redis", "run", *through(server.port), more=more) == tcp
    assert names(server) == []


def test_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*through(1), "comm.init_timeout_s=0.5"]
    assert train_here(monkeypatch, tmp_path / "run", *settings, more=["--nproc", "2"]) != 0
    told = capsys.readouterr().err
    assert "cannot use Redis at redis://127.0.0.1:1/0" in told
    assert "tried for 0.5 s" in told
