"""The queue on Kafka, through a client like kafka-python's. MegaScale's own path (MegaScale 5.1).

    TOPIC.RUN            one partition, so that messages come in order; an entry is a node's turn
    TOPIC.RUN.positions  how far each source is stored, by key; an entry without a source is
                         `ask_again` (make it compacted, so that it stays small)

RUN is the run's folder and id (`run_id.py`).

The store reads by assignment and commits offsets of group "store": it is one process, so no group
has to be balanced, and one that starts again goes on behind what was done. Kafka keeps what it has
by its own rules; the queue is full when the store is `most_entries` behind.

The contract's tests run against a stand-in of the client
(`tests/telemetry/path/kafka_stand_in.py`), which has no call that the client has not; the client
itself was tried where nobody answers: no broker was at hand.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from megascale.errors import ConfigError, require_extra
from megascale.telemetry.path.packing import groups, pack, unpack
from megascale.telemetry.path.queue import Delivery, Message, QueueError

TIMEOUT_S = 10.0
MOST_ENTRIES = 4096  # that wait, of up to a megabyte
_GROUP = "store"
_log = logging.getLogger(__name__)
_GENERATION = b""  # the key of a new generation among the positions


class KafkaQueue:
    """`kafka://HOST:PORT/TOPIC`. For one thread; see `Queue`.

    client  the module `kafka`, or something with the same classes
    """

    def __init__(
        self,
        url: str,
        client: Any = None,
        *,
        run: str = "run",
        most_entries: int = MOST_ENTRIES,
    ) -> None:
        self._client = client or _kafka_python()
        parts = urlsplit(url)
        topic = parts.path.strip("/")
        if parts.scheme != "kafka" or not parts.hostname or not topic:
            raise ConfigError(
                f"telemetry.queue is {url!r}; a Kafka queue is kafka://HOST:PORT/TOPIC"
            )
        topic = f"{topic}.{run}"
        self._where, self._most_entries = url, most_entries
        servers = f"{parts.hostname}:{parts.port or 9092}"
        with self._calls():
            place = {"bootstrap_servers": servers, "bootstrap_timeout_ms": int(TIMEOUT_S * 1000)}
            self._producer = self._client.KafkaProducer(**place, acks="all")
            self._lines = self._client.TopicPartition(topic, 0)
            self._consumer = self._client.KafkaConsumer(
                **place, group_id=_GROUP, enable_auto_commit=False
            )
            self._consumer.assign([self._lines])
            self._said = self._client.TopicPartition(f"{topic}.positions", 0)
            self._positions = self._client.KafkaConsumer(
                **place, group_id=None, enable_auto_commit=False
            )
            self._positions.assign([self._said])
            self._positions.seek_to_beginning(self._said)
        self._committed: dict[str, int] = {}
        self._generation = ""
        self._in_hand: dict[int, int] = {}  # offset -> messages that are not done
        self._next = -1  # the offset behind the last one taken
        self._stored = -1  # what the group committed

    def generation(self) -> str:
        with self._calls():
            self._read_positions()
            if not self._generation:
                self._say(_GENERATION, uuid.uuid4().hex)
                self._read_positions()
        return self._generation

    def publish(self, messages: Sequence[Message]) -> int:
        with self._calls():
            end = self._consumer.end_offsets([self._lines])[self._lines]
            room = self._most_entries - (end - (self._consumer.committed(self._lines) or 0))
            some = list(groups(messages))[: max(room, 0)]
            sent = [
                self._producer.send(self._lines.topic, value=pack(group), partition=0)
                for group in some
            ]
            for future in sent:
                future.get(timeout=TIMEOUT_S)
        return sum(len(group) for group in some)

    def take(self, most: int, wait_s: float) -> list[Delivery]:
        with self._calls():
            if self._next < 0:
                self._stored = self._next = self._consumer.committed(self._lines) or 0
                self._consumer.seek(self._lines, self._next)
            found = self._consumer.poll(timeout_ms=int(wait_s * 1000), max_records=most)
        deliveries = []
        for record in found.get(self._lines, ()):
            self._next = record.offset + 1
            try:
                messages = unpack(record.value)
            except QueueError as error:  # by another version, or by hand
                _log.warning("%s: %s; it is dropped", self._where, error)
                continue
            self._in_hand[record.offset] = len(messages)
            deliveries += [Delivery(message, str(record.offset)) for message in messages]
        return deliveries

    def done(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            offset = int(delivery.ticket)
            left = self._in_hand.get(offset, 1) - 1
            self._in_hand[offset] = left
            if not left:
                del self._in_hand[offset]
        behind = min(self._in_hand, default=self._next)
        if behind > self._stored:
            fields = len(self._client.OffsetAndMetadata._fields)  # a third one since 2.1
            with self._calls():
                place = self._client.OffsetAndMetadata(behind, "", *([-1] * (fields - 2)))
                self._consumer.commit({self._lines: place})
            self._stored = behind

    def commit(self, positions: Mapping[str, int]) -> None:
        with self._calls():
            for source, position in positions.items():
                self._say(source.encode(), str(position), wait=False)
            self._producer.flush(timeout=TIMEOUT_S)

    def committed(self, sources: Collection[str]) -> Mapping[str, int]:
        with self._calls():
            self._read_positions()
        return {s: self._committed[s] for s in sources if s in self._committed}

    def ask_again(self) -> None:
        with self._calls():
            self._say(_GENERATION, uuid.uuid4().hex)

    def close(self) -> None:
        for part in (self._producer, self._consumer, self._positions):
            part.close()

    def _say(self, key: bytes, value: str, *, wait: bool = True) -> None:
        topic = self._said.topic
        future = self._producer.send(topic, key=key, value=value.encode(), partition=0)
        if wait:
            future.get(timeout=TIMEOUT_S)

    def _read_positions(self) -> None:
        """All that was said since the last look; from the beginning where the topic is another."""
        end = self._positions.end_offsets([self._said])[self._said]
        if end < self._positions.position(self._said):
            self._positions.seek_to_beginning(self._said)
            self._committed, self._generation = {}, ""
        while self._positions.position(self._said) < end:
            found = self._positions.poll(timeout_ms=int(TIMEOUT_S * 1000))
            if not found:
                raise QueueError(f"{self._where}: no positions in {TIMEOUT_S:.0f} s; try again")
            for record in found[self._said]:
                if record.key == _GENERATION:
                    self._committed, self._generation = {}, record.value.decode()
                else:
                    self._committed[record.key.decode()] = int(record.value)

    @contextmanager
    def _calls(self) -> Iterator[None]:
        try:
            yield
        except (self._client.errors.KafkaError, OSError) as error:
            self._next = -1  # what was read and did not arrive is read again
            raise QueueError(f"{self._where}: {type(error).__name__}: {error}") from None


def _kafka_python() -> Any:
    try:
        import kafka
    except ImportError:
        raise require_extra("kafka-python", "kafka") from None
    return kafka
