"""Simulated clients speak to real servers as torch's own clients do, and a rung is timed whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megascale.errors import ConfigError, LaunchError
from megascale.parallel.redis_store import RedisStore
from megascale.train.bench_init import simulate, start
from megascale.train.bench_init.calls import Calls, Mark, Pause, Steps
from megascale.train.bench_init.clients import Clients
from megascale.train.bench_init.redis_calls import RedisCalls, encoded, read_answer
from megascale.train.bench_init.rows import shape_rows
from megascale.train.bench_init.sequences import megatron_groups
from megascale.train.bench_init.servers import NO_STALLS, Server, serving
from megascale.train.bench_init.simulate import Measured, Rung, measure, mesh_of
from megascale.train.bench_init.tcp_calls import TcpCalls
from tests.telemetry.path.servers import BINARY
from tools.tables import read_rows, render

os.environ.update(NO_STALLS)
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")
STORES = ["tcp", "tcp-libuv", pytest.param("redis", marks=needs_redis)]


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str) -> Iterator[Server]:
    with serving(kind, 64) as running:
        if kind == "redis":
            simulate._load_scripts(running)
        yield running


def calls_of(kind: str) -> Calls:
    return RedisCalls("start") if kind == "redis" else TcpCalls()


def torch_client(kind: str, port: int, world_size: int) -> Any:
    """The store that a real rank has, beside those that are played."""
    if kind == "redis":
        return RedisStore.open(
            f"redis://127.0.0.1:{port}/0",
            "start",
            rank=world_size - 1,
            world_size=world_size,
            timeout_s=10.0,
        )
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False)


def _one_of_two(calls: Calls, rank: int, world_size: int, got: list[Any]) -> Steps:
    """Rank 0 waits for what rank 1 sets later."""
    yield from calls.join(rank, world_size)
    if rank == 1:
        yield Pause(0.05)
        yield from calls.set("raw", bytes(range(256)))
        got.append((yield from calls.add("count", 40)))
        yield from calls.set("late", b"v" * 100_000)
        yield Pause(0.05)
        yield from calls.set("last", b"x")
    else:
        got.append((yield from calls.get("raw")))
        yield from calls.wait("late")
        got.append(len((yield from calls.get("late"))))
        got.append((yield from calls.add("count", 2)))
        got.append((yield from calls.multi_get(("raw", "last"))))
    yield Mark("done")


def test_calls_are_understood_by_the_server_and_by_torchs_clients(
    kind: str, server: Server
) -> None:
    got: dict[int, list[Any]] = {0: [], 1: []}
    world_size = 3 if kind == "redis" else 2  # the third one is real
    programs = [(r, _one_of_two(calls_of(kind), r, world_size, got[r])) for r in (0, 1)]
    with Clients(server.port, programs) as played:
        played.play(20.0)
    raw = bytes(range(256))
    assert got == {0: [raw, 100_000, 42, [raw, b"x"]], 1: [40]}
    assert set(played.marks_s) == {"done"}
    store = torch_client(kind, server.port, 3)
    assert store.get("raw") == raw
    assert store.add("count", 0) == 42
    assert store.get("count") == b"42"
    assert store.check(["last"])


def test_what_is_never_set_ends_with_the_deadline(kind: str, server: Server) -> None:
    def waits() -> Steps:
        calls = calls_of(kind)
        yield from calls.join(0, 1)
        yield from calls.get("absent")

    told = pytest.raises(TimeoutError, match=r"not done after 0 s: 1 ranks, \[7\]")
    with Clients(server.port, [(7, waits())]) as clients, told:
        clients.play(0.3)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b":-12\r\n", -12),
        (b"$5\r\na\r\nbc\r\n", b"a\r\nbc"),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"+OK\r\n", b"OK"),
        (b"*2\r\n$1\r\nk\r\n*1\r\n:3\r\n", [b"k", [3]]),
        (b"*0\r\n", []),
    ],
)
def test_answers_are_read_whole_or_not_at_all(data: bytes, value: object) -> None:
    assert read_answer(data + b"rest") == (value, len(data))
    assert all(read_answer(data[:cut]) is None for cut in range(len(data)))


def test_a_command_is_what_a_client_sends() -> None:
    assert encoded(["SET", b"k\0", 12]) == b"*3\r\n$3\r\nSET\r\n$2\r\nk\0\r\n$2\r\n12\r\n"


# ------------------------------------------------------------ a rung


def test_ordered_creation_of_64_ranks(kind: str) -> None:
    found = measure(Rung(kind, None), 64, budget_s=5.0, processes=2)
    assert found.is_whole
    assert 0 < found.join_s + found.groups_s + found.ids_s == found.seconds < 10
    assert 10 * 64 < found.requests < 50 * 64


@pytest.mark.full
def test_every_group_is_timed_for_as_many_as_the_budget_allows(kind: str) -> None:
    whole = measure(Rung(kind, "wait"), 64, budget_s=30.0, processes=1)
    assert (whole.num_groups, whole.num_timed) == (len(megatron_groups(mesh_of(64))), 97)
    assert whole.requests > 3 * 64 * 98
    part = measure(Rung(kind, "wait"), 64, budget_s=1e-3, processes=1)
    assert not part.is_whole
    assert part.num_timed == simulate.PROBE_GROUPS
    scale = 98 / (part.num_timed + 1)
    assert part.seconds == pytest.approx(part.join_s + part.ids_s + scale * part.groups_s)


def test_a_server_that_refuses_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_load_scripts", lambda _server: None)  # so scripts are unknown
    if BINARY is None:
        pytest.skip("redis-server is not installed")
    with pytest.raises(LaunchError, match="NOSCRIPT"):
        measure(Rung("redis", None), 64, budget_s=5.0, processes=1)


@pytest.mark.parametrize(
    ("num_ranks", "degrees"), [(8, (8, 1, 1)), (32, (8, 1, 4)), (2_048, (8, 32, 8))]
)
def test_the_layout_is_the_papers(num_ranks: int, degrees: tuple[int, int, int]) -> None:
    mesh = mesh_of(num_ranks)
    assert (mesh.tensor, mesh.data, mesh.pipeline) == degrees


# ------------------------------------------------------------ the verb

NOTHING = {
    "ranks": "0",
    "gloo": "0",
    "stores": "tcp",
    "forms": "own",
    "budget_s": 1.0,
    "processes": 1,
    "commit": "abc",
    "arguments": ["bench", "init", "--ranks", "64", "--output", "somewhere"],
}


@pytest.mark.full
@needs_redis
def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "init.jsonl"
    given = {**NOTHING, "ranks": "64", "stores": "tcp,redis", "forms": "poll,own"}
    assert start.bench_init(output=output, **given) == 0  # type: ignore[arg-type]
    rows = read_rows("init", tmp_path)
    assert len({json.dumps(row["case"]) for row in rows}) == len(rows) == 4 + 3
    assert len({tuple(row["case"]) for row in rows}) == 1, "all have the same keys"
    creation, ratios = rows[:4], rows[4:]
    assert all(row["metric"] == "s" and row["value"] > 0 for row in creation)
    by_case = {(r["case"]["store"], r["case"]["barrier"]): r["value"] for r in creation}
    assert ratios[0]["value"] == by_case["tcp", "poll"] / by_case["redis", "poll"]
    assert ratios[1]["value"] == by_case["redis", "poll"] / by_case["redis", "none"]
    assert {row["command"] for row in rows} == {"megascale bench init --ranks 64"}
    assert rows[0]["versions"]["redis-server"]
    assert "64 ranks" in capsys.readouterr().out
    assert "every group" in render("init what=simulated line=creation", tmp_path)


@pytest.mark.full
def test_a_rung_whose_store_fails_has_no_row_and_the_others_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def give_up_on_own_groups(rung: Rung, num_ranks: int, **given: Any) -> Measured:
        if rung.barrier is None and num_ranks == 64:
            raise LaunchError("simulated ranks ended early: connection reset")
        return measure(rung, num_ranks, **given)

    monkeypatch.setattr(start, "measure", give_up_on_own_groups)
    given = {**NOTHING, "ranks": "64,128", "stores": "tcp", "forms": "own"}
    assert start.bench_init(output=tmp_path / "rows", **given) == 1  # type: ignore[arg-type]
    cases = [json.loads(line)["case"] for line in (tmp_path / "rows").read_text().splitlines()]
    assert [case["ranks"] for case in cases] == [128]
    assert "64 ranks, tcp, own groups, barrier none: failed, no row" in capsys.readouterr().err


def test_the_papers_figures_are_targets_at_its_sizes() -> None:
    from megascale.train.bench.rows import Origin
    from megascale.train.bench_init.rows import simulated_row

    origin = Origin.here(num_ranks=0, on_gpus=False, command="c", given_commit="abc")
    found = Measured(4.0, 0, 0, 1.0, 2.0, 1.0, 100, 0.5, 0.5)
    row = simulated_row(Rung("redis", None), 2_048, found, origin)
    assert (row["target"], row["met"]) == ({"op": "<=", "value": 5.0}, True)
    row = simulated_row(Rung("redis", None), 12_288, found, origin)
    assert (row["target"], row["met"]) == ({"op": "<=", "value": 30.0}, True)
    assert "target" not in simulated_row(Rung("redis", None), 1_024, found, origin)
    assert simulated_row(Rung("tcp", "poll"), 2_048, found, origin)["baselines"] == {
        "paper": 1047.0
    }
    seconds = {
        (Rung("tcp", "poll"), 2_048): 100.0,
        (Rung("redis", "poll"), 2_048): 200.0,
        (Rung("redis", None), 2_048): 1.0,
    }
    rows = shape_rows(seconds, 2_048, origin)
    assert [(row["value"], row["met"]) for row in rows] == [
        (0.5, False),
        (200.0, True),
        (100.0, True),
    ]
    assert [round(row["baselines"]["paper"], 1) for row in rows] == [2.9, 72.2, 209.4]
    small = {(rung, 64): value for (rung, _), value in seconds.items()}
    assert all("target" not in row for row in shape_rows(small, 64, origin))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": "100"}, "nearest legal: 64 or 128"),
        ({"ranks": "10"}, "nearest legal: 64"),
        ({"ranks": "many"}, "give numbers of ranks"),
        ({"ranks": "-64"}, "give numbers of ranks"),
        ({"ranks": "6400000"}, r"this machine carries \d+ connections"),
        ({"gloo": "12"}, "nearest legal: 8 or 16"),
        ({"stores": "etcd"}, "give some of tcp, tcp-libuv, redis"),
        ({"stores": ""}, "give some of"),
        ({"forms": "own,twice"}, "give some of poll, wait, own"),
        ({"output": Path("/dev/null/rows")}, "which is a file"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    output = settings.pop("output", tmp_path / "rows")
    with pytest.raises(ConfigError, match=message):
        start.bench_init(output=output, **{**NOTHING, "ranks": "64", **settings})
    assert not (tmp_path / "rows").exists()


def test_without_redis_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"apt-get install redis-server.*--stores"):
        start.bench_init(output=tmp_path / "rows", **{**NOTHING, "stores": "redis"})  # type: ignore[arg-type]


@pytest.mark.full
@needs_redis
def test_real_ranks(tmp_path: Path) -> None:
    output = tmp_path / "init.jsonl"
    given = {**NOTHING, "gloo": "16", "stores": "tcp-libuv,redis", "forms": "wait,own"}
    assert start.bench_init(output=output, **given) == 0  # type: ignore[arg-type]
    rows = read_rows("init", tmp_path)
    assert [row["case"]["what"] for row in rows] == ["gloo"] * 2 + ["gloo", "gloo-lazy"] * 2
    assert rows[0]["groups"] == len(megatron_groups(mesh_of(16)))
    assert set(rows[-1]["creation_s"]) == {
        "tensor",
        "pipeline",
        "embedding",
        "channels",
        "control",
    }
