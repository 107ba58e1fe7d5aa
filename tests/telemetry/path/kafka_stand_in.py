"""What `KafkaQueue` uses of kafka-python, in memory: topics of one partition, offsets of groups.

As on a broker, offsets count up, a commit is of a group, a poll goes on from the consumer's own
position, and what a consumer has taken is taken by others all the same.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class OffsetAndMetadata(NamedTuple):
    offset: int
    metadata: str
    leader_epoch: int


class KafkaError(RuntimeError):
    pass


@dataclass(frozen=True)
class Record:
    offset: int
    key: bytes | None
    value: bytes


class Broker:
    """Records by topic; `is_down`: every call fails."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.topics: dict[str, list[Record]] = defaultdict(list)
        self.committed: dict[tuple[str | None, TopicPartition], int] = {}
        self.is_down = False

    def check(self) -> None:
        if self.is_down:
            raise KafkaError("NoBrokersAvailable")


class Producer:
    def __init__(
        self, broker: Broker, *, bootstrap_servers: str, bootstrap_timeout_ms: int, acks: str
    ) -> None:
        assert acks == "all", "or what a broker took may be lost"
        self._broker = broker

    def send(
        self, topic: str, *, value: bytes, partition: int, key: bytes | None = None
    ) -> SimpleNamespace:
        self._broker.check()
        assert partition == 0
        with self._broker.changed:
            records = self._broker.topics[topic]
            records.append(Record(len(records), key, value))
            self._broker.changed.notify_all()
        return SimpleNamespace(get=lambda timeout: None)

    def flush(self, timeout: float) -> None:
        self._broker.check()

    def close(self) -> None: ...


class Consumer:
    def __init__(
        self,
        broker: Broker,
        *,
        bootstrap_servers: str,
        bootstrap_timeout_ms: int,
        group_id: str | None,
        enable_auto_commit: bool,
    ) -> None:
        assert not enable_auto_commit, "or what is not stored is forgotten"
        self._broker, self._group, self._at = broker, group_id, dict[TopicPartition, int]()

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self._at = dict.fromkeys(partitions, 0)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._at[partition] = offset

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        self._at |= dict.fromkeys(partitions, 0)

    def position(self, partition: TopicPartition) -> int:
        return self._at[partition]

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        self._broker.check()
        return {partition: len(self._broker.topics[partition.topic]) for partition in partitions}

    def committed(self, partition: TopicPartition) -> int | None:
        self._broker.check()
        return self._broker.committed.get((self._group, partition))

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        self._broker.check()
        for partition, place in offsets.items():
            self._broker.committed[self._group, partition] = place.offset

    def poll(
        self, timeout_ms: int = 0, max_records: int = 500
    ) -> dict[TopicPartition, list[Record]]:
        self._broker.check()
        with self._broker.changed:
            self._broker.changed.wait_for(lambda: self._new(max_records), timeout_ms / 1000)
            found = self._new(max_records)
            for partition, records in found.items():
                self._at[partition] = records[-1].offset + 1
            return found

    def _new(self, most: int) -> dict[TopicPartition, list[Record]]:
        found = {p: self._broker.topics[p.topic][at : at + most] for p, at in self._at.items()}
        return {partition: records for partition, records in found.items() if records}

    def close(self) -> None: ...


def client_of(broker: Broker) -> Any:
    """In place of the module `kafka`."""
    return SimpleNamespace(
        KafkaProducer=partial(Producer, broker),
        KafkaConsumer=partial(Consumer, broker),
        TopicPartition=TopicPartition,
        OffsetAndMetadata=OffsetAndMetadata,
        errors=SimpleNamespace(KafkaError=KafkaError),
    )
