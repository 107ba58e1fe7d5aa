"""What a `RedisStore` does where there is no server, a wrong one, or one that dies: an error that
tells why, with its deadline kept, and no change made twice."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megascale.config import CommConfig
from megascale.errors import ConfigError, LaunchError, MissingExtraError
from megascale.parallel import redis_connection
from megascale.parallel.redis_store import RedisStore
from tests.telemetry.path.servers import BINARY, RedisServer

pytestmark = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """It remembers what it had when it is killed and started again."""
    with RedisServer(tmp_path, appends=True) as running:
        yield running


def open_store(port: int, *, timeout_s: float = 5.0, **more: Any) -> RedisStore:
    start = more.pop("start", uuid.uuid4().hex)
    address = more.pop("address", f"redis://127.0.0.1:{port}/0")
    rank, world_size = more.pop("rank", 0), more.pop("world_size", 1)
    return RedisStore.open(address, start, rank=rank, world_size=world_size, timeout_s=timeout_s)


def took_s(call: Callable[[], object]) -> float:
    start_s = time.monotonic()
    call()
    return time.monotonic() - start_s


class Listener:
    """A port of its own that answers each connection with what `answer` makes of its bytes."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(self._answer(data))

    def close(self) -> None:
        self._socket.close()


class Proxy(Listener):
    """Between a store and its server: loses the answer to a script on demand, and cuts the
    connection, as a network does that breaks after a request has arrived."""

    def __init__(self, port: int) -> None:
        self._upstream_port, self.to_lose = port, 0
        super().__init__(lambda data: data)

    def _talk(self, connection: socket.socket) -> None:
        upstream = socket.create_connection(("127.0.0.1", self._upstream_port))
        with connection, upstream, suppress(OSError):
            while data := connection.recv(65536):
                upstream.sendall(data)
                answer = upstream.recv(65536)
                if self.to_lose and b"EVALSHA" in data:
                    self.to_lose -= 1
                    return
                connection.sendall(answer)


# ------------------------------------------------------------ nobody, or somebody else


def test_no_server_is_told_when_the_deadline_has_passed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])

    def refused() -> None:
        with pytest.raises(LaunchError) as caught:
            open_store(port, timeout_s=0.6)
        message = str(caught.value)
        assert f"Redis at redis://127.0.0.1:{port}/0: " in message
        assert "tried for 0.6 s" in message
        assert "comm.redis_address" in message

    assert 0.5 < took_s(refused) < 3.0


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid.*tried for"):
        open_store(0, address="redis://no-such-host.invalid:6379/0", timeout_s=0.3)


def test_a_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    late = RedisServer(tmp_path)
    threading.Timer(0.4, late.start).start()
    store = open_store(late.port, timeout_s=10.0)
    assert store.add("key", 1) == 1
    store.close()
    late.kill()


def test_what_answers_and_is_no_redis() -> None:
    with closing(Listener(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n")) as web:

        def refused() -> None:
            with pytest.raises(LaunchError, match="no Redis"):
                open_store(web.port, timeout_s=30.0)

        assert took_s(refused) < 3.0, "trying again does not make it one"


def test_somebody_who_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connection, "ATTEMPT_S", 0.2)
    monkeypatch.setattr(redis_connection, "ANSWER_S", 0.2)
    with closing(Listener(lambda _: b"")) as silent:

        def refused() -> None:
            with pytest.raises(LaunchError, match=r"(no answer|Timeout).*tried for"):
                open_store(silent.port, timeout_s=0.5)

        assert took_s(refused) < 3.0


def test_passwords(server: RedisServer) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        client.config_set("requirepass", "secret")
    with pytest.raises(LaunchError, match="password") as caught:
        open_store(server.port, address=f"redis://:wrong@127.0.0.1:{server.port}/0")
    assert "wrong" not in str(caught.value)
    with pytest.raises(LaunchError, match="password"):
        open_store(server.port)
    store = open_store(server.port, address=f"redis://:secret@127.0.0.1:{server.port}/0")
    store.set("key", "v")
    with pytest.raises(dist.DistStoreError) as lost:
        store.wait(["absent"], timedelta(milliseconds=10))
    assert "secret" not in str(lost.value)
    store.close()


def test_a_server_that_is_full(server: RedisServer) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        client.config_set("maxclients", 1)
        with pytest.raises(LaunchError, match="raise the server's maxclients"):
            open_store(server.port, timeout_s=0.3)


def test_no_such_database(server: RedisServer) -> None:
    with pytest.raises(LaunchError, match="DB index is out of range"):
        open_store(server.port, address=f"redis://127.0.0.1:{server.port}/999")


@pytest.mark.parametrize("address", ["redis//host", "http://host:1", "redis://host:port/0"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises((ConfigError, ValueError), match="redis"):
        open_store(0, address=address)
    with pytest.raises(ValueError, match=r"legal: redis://HOST:PORT/DATABASE"):
        CommConfig(init_store="redis", redis_address=address)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_store": "redis"}, "without comm.redis_address; name the server there"),
        (
            {"redis_address": "redis://me:secret@host:1/0"},
            "'redis://host:1/0' with comm.init_store tcp; set comm.init_store to redis",
        ),
        ({"init_store": "etcd"}, "'tcp' or 'redis'"),
    ],
)
def test_settings_that_contradict(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        CommConfig(**settings)
    assert "me:secret@" not in str(caught.value).split("[type=")[0]


def test_without_redis_py_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'megascale\[telemetry\]'"):
        open_store(1)


# ------------------------------------------------------------ a server that dies


def test_a_change_whose_answer_was_lost_is_not_made_twice(server: RedisServer) -> None:
    with closing(Proxy(server.port)) as proxy:
        store = open_store(proxy.port)
        changes: list[tuple[Callable[[], object], object]] = [
            (lambda: store.add("count", 1), 1),
            (lambda: store.add("count", 1), 2),
            (lambda: store.append("text", "a"), None),
            (lambda: store.get("text"), b"a"),
            (lambda: store.compare_set("once", "", "v"), b"v"),
            (lambda: store.queue_push("queue", "x"), None),
            (lambda: store.queue_push("queue", "y"), None),
            (lambda: store.queue_pop("queue"), b"x"),
            (lambda: store.queue_len("queue"), 1),
            (lambda: store.delete_key("once"), True),
            (lambda: store.delete_key("once"), False),
        ]
        for change, expected in changes:
            proxy.to_lose = 1
            assert change() == expected
            assert proxy.to_lose == 0, "the answer was not lost"
        store.close()


def test_a_restart_in_a_wait_is_survived_by_a_server_that_remembers(server: RedisServer) -> None:
    store, other = (open_store(server.port, start="s", rank=r, world_size=2) for r in (0, 1))
    store.set("before", "kept")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(store.get, "key"), pool.submit(other.get, "key")]
        time.sleep(1.2)  # appendfsync is everysec
        server.kill()
        time.sleep(0.2)
        server.start()
        store.set("key", "v")
        assert [one.result(timeout=10) for one in waiting] == [b"v", b"v"]
    assert other.get("before") == b"kept"
    for one in (store, other):
        one.close()


def test_a_restart_without_memory_ends_every_wait_at_once(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as forgetful:
        store = open_store(forgetful.port, timeout_s=60.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "key")
            time.sleep(0.2)
            forgetful.kill()
            forgetful.start()

            def lost() -> None:
                with pytest.raises(dist.DistStoreError, match="does not know this run any more"):
                    waiting.result(timeout=30)

            assert took_s(lost) < 5.0


def test_a_server_that_is_gone(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connection, "RECONNECT_S", 0.5)
    store = open_store(server.port, timeout_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["key"])
        time.sleep(0.2)
        server.kill()

        def lost() -> None:
            with pytest.raises(dist.DistStoreError, match=r"127\.0\.0\.1.*tried for 0\.5 s"):
                waiting.result(timeout=30)

        assert took_s(lost) < 3.0
    with pytest.raises(dist.DistStoreError):
        store.set("key", "v")
    start_s = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        store.close()
    assert time.monotonic() - start_s < 2.0, "who ends does not wait for a server that is gone"


def test_a_server_that_hangs(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is gone without a word, or the process stands still: no connection breaks."""
    monkeypatch.setattr(redis_connection, "ATTEMPT_S", 0.3)
    monkeypatch.setattr(redis_connection, "ANSWER_S", 0.3)
    store = open_store(server.port, timeout_s=0.4)
    os.kill(server.pid, signal.SIGSTOP)
    try:

        def lost() -> None:
            with pytest.raises(dist.DistStoreError, match=r"(no answer|Timeout).*tried for"):
                store.wait(["key"], timedelta(seconds=0.4))

        assert took_s(lost) < 4.0
    finally:
        os.kill(server.pid, signal.SIGCONT)
