"""The queue on a Redis server: a stream with a consumer group.

    NAME:RUN:lines       the stream; an entry is the messages of a node's turn (`packing.py`)
    NAME:RUN:bytes       of all entries: at `most_bytes` the queue refuses; nothing is ever trimmed
    NAME:RUN:committed   hash: how far each source is stored
    NAME:RUN:generation  drawn by `ask_again`, and where it is missing: the server was emptied
    NAME:RUN:consumer:X  a lease; a consumer without one is dead

RUN is the run's folder and id (`run_id.py`), so several runs may have one address.
A server that restarts has another run id, whatever it remembers: that is the other half of the
generation. Bytes are checked and counted in scripts, which the server runs one after another, so
any number of streamers keep the bound.

Messages come in order, so a consumer that finds entries of another one takes none before that one
is known dead, `LEASE_S` after its last word, and then claims them first (XAUTOCLAIM).

redis-py retries a read that ran into its `socket_timeout` of 5 s, and loses what was read: here a
blocking read is shorter than the timeout, and nothing is retried; after an error, what was taken
and did not arrive is claimed again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megascale.errors import ConfigError, require_extra
from megascale.telemetry.path.packing import groups, pack, unpack
from megascale.telemetry.path.queue import Delivery, Message, QueueError

TIMEOUT_S = 10.0  # of a call
LONGEST_WAIT_S = 2.0  # of a blocking read
LEASE_S = 3.0
MOST_ENTRIES = 64  # a take: of up to a megabyte each
_GROUP = "store"
_FIELD = b"m"
T = TypeVar("T")
_log = logging.getLogger(__name__)

# KEYS lines, bytes; ARGV most_bytes, entries. How many entries were taken.
_PUBLISH = """
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('SET', KEYS[2], 0) end
local held = tonumber(redis.call('GET', KEYS[2]) or '0')
for i = 2, #ARGV do
  if held > 0 and held + #ARGV[i] > tonumber(ARGV[1]) then return i - 2 end
  redis.call('XADD', KEYS[1], '*', 'm', ARGV[i])
  held = redis.call('INCRBY', KEYS[2], #ARGV[i])
end
return #ARGV - 1
"""
# KEYS lines, bytes; ARGV group, then id and bytes of each entry.
_DONE = """
for i = 2, #ARGV, 2 do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  if redis.call('XDEL', KEYS[1], ARGV[i]) == 1 then redis.call('DECRBY', KEYS[2], ARGV[i + 1]) end
end
"""


class RedisQueue:
    """`redis://[:PASSWORD@]HOST:PORT/NAME`. For one thread; see `Queue`."""

    def __init__(
        self, url: str, *, run: str = "run", most_bytes: int = 1 << 30, lease_s: float = LEASE_S
    ) -> None:
        try:
            import redis
            from redis.retry import Retry
        except ImportError:
            raise require_extra("redis", "telemetry") from None
        self._error = redis.exceptions.RedisError
        parts = urlsplit(url)
        name = parts.path.strip("/")
        if parts.scheme != "redis" or not parts.hostname or not name:
            raise ConfigError(
                f"telemetry.queue is {url!r}; a Redis queue is redis://HOST:PORT/NAME"
            )
        self._where = f"redis://{parts.hostname}:{parts.port or 6379}/{name}"
        self._redis: Any = redis.Redis(
            host=parts.hostname,
            port=parts.port or 6379,
            password=parts.password,
            username=parts.username or None,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(backoff=redis.backoff.NoBackoff(), retries=0),
            protocol=2,
        )
        name = f"{name}:{run}"
        self._lines, self._bytes = f"{name}:lines", f"{name}:bytes"
        self._committed, self._generation = f"{name}:committed", f"{name}:generation"
        self._publish = self._redis.register_script(_PUBLISH)
        self._done = self._redis.register_script(_DONE)
        self._consumer, self._lease = uuid.uuid4().hex, f"{name}:consumer:"
        self._most_bytes, self._lease_ms = most_bytes, int(lease_s * 1000)
        self._in_hand: dict[str, tuple[int, int]] = {}  # entry -> messages not done, bytes
        self._must_claim = True

    def generation(self) -> str:
        with self._calls():
            self._redis.set(self._generation, uuid.uuid4().hex, nx=True)
            drawn = self._redis.get(self._generation)
            return f"{self._redis.info('server')['run_id']} {drawn.decode()}"

    def publish(self, messages: Sequence[Message]) -> int:
        grouped = list(groups(messages))
        if not grouped:
            return 0
        with self._calls():
            entries = [pack(group) for group in grouped]
            taken = self._publish([self._lines, self._bytes], [self._most_bytes, *entries])
        return sum(len(group) for group in grouped[:taken])

    def take(self, most: int, wait_s: float) -> list[Delivery]:
        with self._calls():
            self._redis.set(self._lease + self._consumer, b"", px=self._lease_ms)
            count = min(most, MOST_ENTRIES)
            if self._must_claim:
                claimed = self._claim(count)
                if claimed is None:
                    time.sleep(min(wait_s, 0.1))
                    return []
                if claimed:
                    return self._deliver(claimed)
                self._must_claim = False
            block_ms = int(min(wait_s, LONGEST_WAIT_S) * 1000)
            read = self._in_group(
                lambda: self._redis.xreadgroup(
                    _GROUP, self._consumer, {self._lines: ">"}, count=count, block=block_ms or None
                )
            )
            return self._deliver([entry for _, entries in read for entry in entries])

    def done(self, deliveries: Sequence[Delivery]) -> None:
        over: list[str | int] = []
        for delivery in deliveries:
            left, size = self._in_hand.get(delivery.ticket, (0, 0))
            if left == 1:
                over += [delivery.ticket, size]
            elif left:
                self._in_hand[delivery.ticket] = left - 1, size
        with self._calls():
            if over:
                self._done([self._lines, self._bytes], [_GROUP, *over])
            for ticket in over[::2]:
                self._in_hand.pop(str(ticket), None)

    def commit(self, positions: Mapping[str, int]) -> None:
        if positions:
            with self._calls():
                self._redis.hset(self._committed, mapping=positions)

    def committed(self, sources: Collection[str]) -> Mapping[str, int]:
        names = list(sources)
        if not names:
            return {}
        with self._calls():
            found = self._redis.hmget(self._committed, names)
        pairs = zip(names, found, strict=True)
        return {name: int(position) for name, position in pairs if position is not None}

    def ask_again(self) -> None:
        with self._calls(), self._redis.pipeline(transaction=True) as calls:
            calls.delete(self._committed)
            calls.set(self._generation, uuid.uuid4().hex)
            calls.execute()

    def close(self) -> None:
        """Give up the lease: what was taken and not done comes again at once."""
        try:
            with self._calls():
                self._redis.delete(self._lease + self._consumer)
        finally:
            self._redis.close()

    # ------------------------------------------------------------ entries of others

    def _claim(self, count: int) -> list[Any] | None:
        """Entries that were taken by nobody alive, oldest first; None while somebody alive has
        some."""
        for consumer in self._in_group(lambda: self._redis.xinfo_consumers(self._lines, _GROUP)):
            name = consumer["name"].decode()
            if name == self._consumer:
                continue
            if self._redis.exists(self._lease + name):
                if consumer["pending"]:
                    return None
            elif not consumer["pending"]:
                self._redis.xgroup_delconsumer(self._lines, _GROUP, name)
        found: list[Any] = []
        start: Any = "0-0"
        while len(found) < count:
            start, entries, *_ = self._redis.xautoclaim(
                self._lines, _GROUP, self._consumer, 0, start_id=start, count=count
            )
            found += [entry for entry in entries if entry[0].decode() not in self._in_hand]
            if start in (b"0-0", "0-0"):
                break
        return found

    def _deliver(self, entries: Sequence[Any]) -> list[Delivery]:
        deliveries = []
        for number, fields in entries:
            ticket, data = number.decode(), fields.get(_FIELD, b"")
            try:
                messages = unpack(data)
            except QueueError as error:  # by another version, or by hand: it would come for ever
                _log.warning("%s: %s; it is dropped", self._where, error)
                self._done([self._lines, self._bytes], [_GROUP, ticket, len(data)])
                continue
            self._in_hand[ticket] = len(messages), len(data)
            deliveries += [Delivery(message, ticket) for message in messages]
        return deliveries

    def _in_group(self, call: Callable[[], T]) -> T:
        """The result of a call that needs the group, which a server that was emptied lost."""
        try:
            return call()
        except self._error as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error):
                raise
        self._redis.xgroup_create(self._lines, _GROUP, id="0", mkstream=True)
        return call()

    @contextmanager
    def _calls(self) -> Iterator[None]:
        try:
            yield
        except (self._error, OSError) as error:
            self._must_claim = True
            raise QueueError(f"{self._where}: {type(error).__name__}: {error}") from None
