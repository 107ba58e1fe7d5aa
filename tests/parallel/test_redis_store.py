"""`RedisStore` keeps torch's contract: the same calls on torch's TCPStore and on a real Redis."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megascale.errors import LaunchError
from megascale.parallel.redis_store import RedisStore
from tests.telemetry.path.servers import BINARY, RedisServer

# torch asks for the names of both ends of a connection: what does not answer is not asked for long
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
pytestmark = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")
Stores = Callable[[], dist.Store]
"""Makes one more client of the same store."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


def address_of(server: RedisServer) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def redis_stores(server: RedisServer) -> Iterator[Callable[[], RedisStore]]:
    start, opened = uuid.uuid4().hex, list[RedisStore]()

    def another() -> RedisStore:
        rank = len(opened)
        store = RedisStore.open(address_of(server), start, rank=rank, world_size=4, timeout_s=5.0)
        opened.append(store)
        return store

    yield another
    for store in opened:
        store.close()


@pytest.fixture(scope="module")
def tcp_clients() -> Iterator[list[dist.TCPStore]]:
    """A server and three clients of it, for all tests."""
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [
        dist.TCPStore(
            "127.0.0.1", first.port, timeout=timedelta(seconds=60), wait_for_workers=False
        )
        for _ in range(3)
    ]
    del first  # until here the server lives


@pytest.fixture
def tcp_stores(tcp_clients: list[dist.TCPStore]) -> Stores:
    prefix, left = uuid.uuid4().hex, iter(tcp_clients)

    def another() -> dist.Store:
        store = next(left)
        store.set_timeout(timedelta(seconds=5))
        return dist.PrefixStore(prefix, store)

    return another


@pytest.fixture(params=["redis", "redis, prefixed", "tcp"])
def stores(request: pytest.FixtureRequest) -> Stores:
    kind, *prefixed = request.param.split(", ")
    make: Stores = request.getfixturevalue(f"{kind}_stores")
    return (lambda: dist.PrefixStore("of", make())) if prefixed else make


def test_values(stores: Stores) -> None:
    store, other = stores(), stores()
    before = store.num_keys()
    store.set("text", "v")
    assert other.get("text") == b"v"
    other.set("text", "w")
    assert store.get("text") == b"w"
    raw = bytes(range(256))
    store.set("raw", raw)  # type: ignore[arg-type]  # torch takes bytes too
    assert other.get("raw") == raw
    store.set("empty", "")
    assert other.get("empty") == b""
    assert other.check(["text", "raw", "empty"])
    assert not other.check(["text", "absent"])
    assert other.num_keys() == before + 3
    assert (store.delete_key("text"), store.delete_key("text")) == (True, False)
    assert not other.check(["text"])
    assert other.num_keys() == before + 2


def test_counters(stores: Stores) -> None:
    store, other = stores(), stores()
    assert [store.add("count", 5), other.add("count", -7), store.add("count", 0)] == [5, -2, -2]
    assert other.get("count") == b"-2"
    store.set("set", "41")
    assert other.add("set", 1) == 42
    large = 2**62
    assert [store.add("large", large), store.add("large", 12_345)] == [large, large + 12_345]


def test_compare_set(stores: Stores) -> None:
    store = stores()
    assert store.compare_set("key", "", "first") == b"first"  # of a missing key: expects nothing
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.compare_set("key", "first", "third") == b"second"
    assert store.compare_set("key", "", "third") == b"second"
    assert store.compare_set("absent", "expected", "desired") == b"expected"
    assert not store.check(["absent"])
    assert store.get("key") == b"second"


def test_several_at_once(stores: Stores) -> None:
    store: Any = stores()
    other: Any = stores()
    assert store.has_extended_api()
    keys = [f"key{i}" for i in range(9_000)]  # more than Lua's stack holds
    store.multi_set(keys, [str(i) for i in range(9_000)])
    assert other.multi_get(keys[::-1]) == [str(i).encode() for i in range(9_000)][::-1]
    assert other.check(keys)
    other.wait(keys, timedelta(seconds=5))
    assert store.multi_get([]) == []


def test_append(stores: Stores) -> None:
    store: Any = stores()
    store.append("text", "po")
    store.append("text", "tato")
    assert store.get("text") == b"potato"
    store.set("set", "a\0b")
    store.append("set", "c")
    assert store.get("set") == b"a\0bc"


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.set("key", "v"),
        lambda store: store.add("key", 1),
        lambda store: store.append("key", "v"),
        lambda store: store.multi_set(["key"], ["v"]),
        lambda store: store.compare_set("key", "", "v"),
    ],
    ids=["set", "add", "append", "multi_set", "compare_set"],
)
@pytest.mark.parametrize(
    "wait",
    [
        lambda store: store.wait(["there", "key"], timedelta(seconds=5)),
        lambda store: store.get("key"),
        lambda store: store.multi_get(["key", "there"]),
    ],
    ids=["wait", "get", "multi_get"],
)
@pytest.mark.parametrize("kind", ["redis", "tcp"])
def test_every_change_ends_every_wait(
    request: pytest.FixtureRequest,
    kind: str,
    wait: Callable[[dist.Store], Any],
    change: Callable[[dist.Store], Any],
) -> None:
    make: Stores = request.getfixturevalue(f"{kind}_stores")
    setter, waiters = make(), [make(), make()]
    setter.set("there", "x")
    with ThreadPoolExecutor(len(waiters)) as pool:
        waiting = [pool.submit(wait, waiter) for waiter in waiters]
        time.sleep(0.05)
        assert not any(one.done() for one in waiting)
        change(setter)
        for one in waiting:
            one.result(timeout=5)


def test_many_waiters_of_a_key_are_released_at_once(server: RedisServer) -> None:
    """300 threads of one store, so 300 connections, each blocked on the server."""
    store = RedisStore.open(address_of(server), "many", rank=0, world_size=1, timeout_s=30.0)
    with ThreadPoolExecutor(300) as pool:
        waiting = [pool.submit(store.get, "key") for _ in range(300)]
        while int(_info(server, "clients")["blocked_clients"]) < 300:
            time.sleep(0.01)
        before = int(_info(server, "stats")["total_commands_processed"])
        time.sleep(0.3)
        asked = int(_info(server, "stats")["total_commands_processed"]) - before
        assert asked <= 2, "somebody polls"
        store.set("key", "v")
        assert [one.result(timeout=10) for one in waiting] == [b"v"] * 300
    store.close()


def test_a_timeout_names_the_missing_keys_and_keeps_its_deadline(stores: Stores) -> None:
    store = stores()
    store.set("there", "v")
    start_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 300ms, keys: .*absent"):
        store.wait(["there", "absent"], timedelta(milliseconds=300))
    assert 0.3 <= time.monotonic() - start_s < 1.5
    store.set_timeout(timedelta(milliseconds=200))
    for call in (lambda: store.get("absent"), lambda: store.multi_get(["there", "absent"])):
        with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms"):
            call()
    store.add("absent", 1)  # a store is as good as before
    assert store.get("absent") == b"1"


def test_only_missing_keys_are_named(redis_stores: Callable[[], RedisStore]) -> None:
    store = redis_stores()
    store.set("there", "v")
    keys = ["there", *(f"absent{i}" for i in range(11))]
    with pytest.raises(dist.DistStoreError) as caught:
        store.wait(keys, timedelta(milliseconds=50))
    message = str(caught.value)
    assert "there," not in message
    assert "absent0, absent1," in message
    assert "absent7 and 3 more" in message


def test_a_key_that_came_and_went_is_waited_for_again(stores: Stores) -> None:
    store, other = stores(), stores()
    store.set("key", "old")
    store.delete_key("key")
    threading.Timer(0.2, lambda: store.set("key", "new")).start()
    start_s = time.monotonic()
    assert other.get("key") == b"new"
    assert time.monotonic() - start_s > 0.1


@pytest.mark.parametrize("kind", ["redis", "tcp"])
def test_queues(request: pytest.FixtureRequest, kind: str) -> None:
    store: Any = request.getfixturevalue(f"{kind}_stores")()
    assert store.queue_len("queue") == 0
    for value in ("a", "b"):
        store.queue_push("queue", value)
    assert store.queue_len("queue") == 2
    assert store.check(["queue"])
    store.wait(["queue"], timedelta(seconds=1))
    assert [store.queue_pop("queue"), store.queue_pop("queue", False)] == [b"a", b"b"]
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("queue", False)


def test_each_value_of_a_queue_is_popped_once(redis_stores: Callable[[], RedisStore]) -> None:
    """torch's TCPStore keeps the interpreter's lock in queue_pop: no threads there."""
    store = redis_stores()
    with ThreadPoolExecutor(4) as pool:
        popping = [pool.submit(store.queue_pop, "queue") for _ in range(20)]
        time.sleep(0.05)
        for i in range(20):
            store.queue_push("queue", str(i))
        got = [one.result(timeout=5) for one in popping]
    assert sorted(int(value) for value in got) == list(range(20))


def test_counting_from_many_threads_loses_nothing(redis_stores: Callable[[], RedisStore]) -> None:
    store = redis_stores()
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda _: store.add("count", 1), range(400)))
    assert sorted(sums) == list(range(1, 401))


def test_clone_has_a_timeout_of_its_own(stores: Stores) -> None:
    store: Any = stores()
    copy = store.clone()
    copy.set_timeout(timedelta(milliseconds=100))
    copy.set("key", "v")
    assert store.get("key") == b"v"
    with pytest.raises(dist.DistStoreError, match="100ms"):
        copy.get("absent")
    assert store.timeout == timedelta(seconds=5)


def test_keys_of_a_start_stay_apart_and_go_with_its_last_rank(server: RedisServer) -> None:
    first, second = (
        [
            RedisStore.open(address_of(server), s, rank=r, world_size=2, timeout_s=5.0)
            for r in (0, 1)
        ]
        for s in ("start-a", "start-b")
    )
    first[0].set("key", "a")
    second[0].set("key", "b")
    second[0].queue_push("queue", "x")
    assert (first[1].get("key"), second[1].get("key")) == (b"a", b"b")
    assert sorted(second[1].list_keys()) == ["key"]
    names = _keys(server, "megascale:store:start-a*")
    assert names
    assert all(_ttl_s(server, name) > 0 for name in names), "a run that dies leaves them for ever"
    first[0].close()
    assert first[1].get("key") == b"a"
    first[1].close()
    assert not _keys(server, "megascale:store:start-a:values")
    assert second[0].get("key") == b"b"
    with pytest.raises(dist.DistStoreError, match="this store is closed"):
        first[0].get("key")
    for store in second:
        store.close()


def test_a_rank_or_world_that_does_not_fit_is_refused(server: RedisServer) -> None:
    store = RedisStore.open(address_of(server), "one", rank=0, world_size=2, timeout_s=5.0)
    with pytest.raises(LaunchError, match=r"start 'one'.*a rank 0 already.*MEGASCALE_START"):
        RedisStore.open(address_of(server), "one", rank=0, world_size=2, timeout_s=5.0)
    with pytest.raises(LaunchError, match="has a world of 2"):
        RedisStore.open(address_of(server), "one", rank=1, world_size=4, timeout_s=5.0)
    store.close()


def _command(server: RedisServer, *words: str) -> Any:
    import redis

    with redis.Redis(port=server.port) as client:
        return client.execute_command(*words)


def _info(server: RedisServer, section: str) -> Any:
    return _command(server, "INFO", section)


def _keys(server: RedisServer, pattern: str) -> list[str]:
    return [name.decode() for name in _command(server, "KEYS", pattern)]


def _ttl_s(server: RedisServer, name: str) -> int:
    return int(_command(server, "TTL", name))
