"""The contract of a queue, for each that there is. Redis is a real server of the test's own; of
Kafka there is a stand-in for the client's library (`kafka_stand_in.py`) and no broker."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megascale.errors import ConfigError, MissingExtraError
from megascale.telemetry.path.connect import open_queue
from megascale.telemetry.path.kafka import KafkaQueue
from megascale.telemetry.path.local import LocalQueue
from megascale.telemetry.path.packing import pack, unpack
from megascale.telemetry.path.queue import Delivery, Message, Queue, QueueError
from megascale.telemetry.path.redis_streams import RedisQueue
from tests.telemetry.path.kafka_stand_in import Broker, client_of
from tests.telemetry.path.servers import BINARY, RedisServer

Connect = Callable[..., Queue]
WAIT_S = 5.0


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if BINARY is None:
        pytest.skip("redis-server is not installed")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["local", "kafka", pytest.param("redis", marks=pytest.mark.full)])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects to one queue, which is empty at first; `most_bytes` bounds it."""
    with ExitStack() as closing:
        if request.param == "local":
            shared = LocalQueue(1000)
            yield lambda: shared
        elif request.param == "kafka":
            broker = Broker()

            def kafka() -> Queue:
                queue = KafkaQueue("kafka://broker:9092/run", client_of(broker), most_entries=5)
                closing.callback(queue.close)
                return queue

            yield kafka
        else:
            port = request.getfixturevalue("redis_server").port
            url = f"redis://127.0.0.1:{port}/{uuid.uuid4().hex}"

            def redis() -> Queue:
                queue = RedisQueue(url, most_bytes=1000, lease_s=0.2)
                closing.callback(queue.close)
                return queue

            yield redis


def message(number: int, size: int = 20, source: str = "rank_00001.jsonl:ab") -> Message:
    return Message(source, 1, number * 100, b"%d" % (number % 10) * (size - 1) + b"\n")


def test_messages_come_as_they_were_given(connect: Connect) -> None:
    sent = [message(1), Message("node.jsonl:\u00e9", -1, 7, b"", passed_over=9), message(2)]
    assert connect().publish(sent) == 3
    store = connect()
    taken = [delivery.message for delivery in _take(store, 3)]
    assert taken == sent
    assert store.take(10, 0.0) == []  # somebody has them


def test_waits_for_the_first_message(connect: Connect) -> None:
    streamer, store = connect(), connect()
    timer = threading.Timer(0.1, lambda: streamer.publish([message(1)]))
    timer.start()
    began_s = time.monotonic()
    assert [d.message for d in _take(store, 1)] == [message(1)]
    assert time.monotonic() - began_s < WAIT_S
    timer.join()
    began_s = time.monotonic()
    assert store.take(1, 0.05) == []
    assert time.monotonic() - began_s < 1.0


def test_a_full_queue_refuses_and_takes_again_what_was_done(connect: Connect) -> None:
    streamer, store = connect(), connect()
    many = [message(number, size=300) for number in range(12)]
    given = 0
    while (taken := streamer.publish(many[given : given + 1])) == 1:
        given += taken
    assert 1 <= given <= 5
    store.done(_take(store, given))
    assert streamer.publish(many[given : given + 1]) == 1
    assert [d.message for d in _take(store, 1)] == [many[given]]


def test_what_a_consumer_that_ended_had_not_done_comes_again(connect: Connect) -> None:
    streamer, first = connect(), connect()
    for number in range(4):
        streamer.publish([message(number)])
    deliveries = _take(first, 4)
    first.done(deliveries[:2])
    first.close()
    streamer.publish([message(4)])
    second = connect()
    again = [delivery.message for delivery in _take(second, 3)]
    assert again == [message(2), message(3), message(4)], "in order, before what is new"


def test_says_what_was_committed(connect: Connect) -> None:
    streamer, store = connect(), connect()
    assert streamer.committed(["a:1", "b:2"]) == {}
    store.commit({"a:1": 5, "b:2": 1 << 50})
    store.commit({"a:1": 7})
    store.commit({})
    assert streamer.committed(["a:1", "c:3", "b:2"]) == {"a:1": 7, "b:2": 1 << 50}
    assert streamer.committed([]) == {}


@pytest.mark.full
@pytest.mark.parametrize("other_name", ["runs/b", "elsewhere/a"])
def test_runs_of_one_address_do_not_meet(
    redis_server: RedisServer, tmp_path: Path, other_name: str
) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/{uuid.uuid4().hex}"
    folders = [tmp_path / "runs/a", tmp_path / other_name]
    for folder in folders:
        folder.mkdir(parents=True)
    one, other = (open_queue(url, folder) for folder in folders)
    one.publish([message(1)])
    other.commit({"a:1": 1})
    assert other.take(1, 0.0) == []
    assert one.committed(["a:1"]) == {}
    again = open_queue(url, folders[0])  # a store, perhaps on another node
    assert len(_take(again, 1)) == 1
    for queue in (one, other, again):
        queue.close()


def test_asking_again_forgets_positions_and_is_seen(connect: Connect) -> None:
    streamer, store = connect(), connect()
    before = streamer.generation()
    assert before == streamer.generation() == store.generation()
    store.commit({"a:1": 5})
    store.ask_again()
    assert streamer.generation() != before
    assert streamer.committed(["a:1"]) == {}
    store.commit({"a:1": 3})
    assert streamer.committed(["a:1"]) == {"a:1": 3}


def test_a_packed_entry_is_checked() -> None:
    sent = [message(1), message(2)]
    assert unpack(pack(sent)) == sent
    for data in (b"", b"x", b"[]", pack(sent)[:-1], pack(sent).replace(b'"v":1', b'"v":2')):
        with pytest.raises(QueueError):
            unpack(data)


@pytest.mark.parametrize("url", ["redis://", "redis://host", "redis://:1/x", "http://host/x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://HOST:PORT/NAME"):
        RedisQueue(url)


def test_without_its_library_kafka_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kafka", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'megascale\[kafka\]'"):
        KafkaQueue("kafka://host:1/topic")


def test_kafkas_own_client_says_that_nobody_is_there() -> None:
    """In a process of its own: of a connection that fails the client leaves sockets behind."""
    pytest.importorskip("kafka", reason="extra kafka")
    program = (
        "from megascale.telemetry.path import kafka\n"
        "kafka.TIMEOUT_S = 0.2\n"
        "try:\n    kafka.KafkaQueue('kafka://127.0.0.1:1/run')\n"
        "except kafka.QueueError as error:\n    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert ran.stdout.startswith("kafka://127.0.0.1:1/run: KafkaTimeoutError")


def test_kafkas_own_client_has_what_is_used_of_it() -> None:
    client = pytest.importorskip("kafka", reason="extra kafka")
    for name in ("KafkaProducer", "KafkaConsumer"):
        theirs, ours = getattr(client, name), getattr(client_of(Broker()), name)
        given = inspect.signature(ours.func.__init__).parameters.keys() - {"self", "broker"}
        assert given <= theirs.DEFAULT_CONFIG.keys(), name
        for call in (one for one in vars(ours.func) if not one.startswith("_")):
            parameters = inspect.signature(getattr(ours.func, call)).parameters
            assert parameters.keys() <= inspect.signature(getattr(theirs, call)).parameters.keys()
    assert client.OffsetAndMetadata._fields == client_of(Broker()).OffsetAndMetadata._fields
    assert issubclass(client.errors.KafkaError, Exception)


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(QueueError, match=r"redis://127\.0\.0\.1:1/run"):
        RedisQueue("redis://127.0.0.1:1/run").generation()


@pytest.mark.full
def test_a_consumer_waits_for_one_that_is_alive_and_takes_over_from_a_dead_one(
    redis_server: RedisServer,
) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/{uuid.uuid4().hex}"
    first, second = RedisQueue(url, lease_s=0.3), RedisQueue(url, lease_s=0.3)
    first.publish([message(1)])
    assert len(_take(first, 1)) == 1
    first.publish([message(2)])
    assert second.take(10, 0.0) == [], "message 1 is before it, with somebody who lives"
    time.sleep(0.35)  # `first` says nothing more
    assert [d.message for d in _take(second, 2)] == [message(1), message(2)]
    first.close()
    second.close()


@pytest.mark.full
def test_a_server_that_restarts_is_another_generation(tmp_path: Path) -> None:
    if BINARY is None:
        pytest.skip("redis-server is not installed")
    with RedisServer(tmp_path) as server:
        queue = RedisQueue(server.url)
        before = queue.generation()
        queue.publish([message(1)])
        server.kill()
        with pytest.raises(QueueError):
            queue.generation()
        server.start()
        assert queue.generation() != before
        queue.publish([message(2)])
        assert [d.message for d in _take(queue, 1)] == [message(2)]
        assert queue.take(1, 0.0) == []
        queue.close()


@pytest.mark.full
def test_an_entry_by_somebody_else_is_dropped(redis_server: RedisServer) -> None:
    import redis

    name = uuid.uuid4().hex
    with redis.Redis(port=redis_server.port) as plain:
        plain.xadd(f"{name}:run:lines", {"m": "rubbish"})
        plain.xadd(f"{name}:run:lines", {"other": "x"})
        queue = RedisQueue(f"redis://127.0.0.1:{redis_server.port}/{name}")
        queue.publish([message(1)])
        assert [d.message for d in _take(queue, 1)] == [message(1)]
        assert plain.xlen(f"{name}:run:lines") == 1
    queue.close()


def _take(queue: Queue, count: int) -> list[Delivery]:
    """`count` deliveries, in as many calls as it takes."""
    found: list[Delivery] = []
    give_up_s = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < give_up_s:
        found += queue.take(count - len(found), 0.05)
    assert len(found) == count, found
    return found
