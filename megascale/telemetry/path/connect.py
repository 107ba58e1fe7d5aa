"""Which queue an address means: `telemetry.queue`, or `megascale stream --queue`."""

from __future__ import annotations

from pathlib import Path

from megascale.errors import ConfigError
from megascale.telemetry.path.kafka import KafkaQueue
from megascale.telemetry.path.queue import Queue
from megascale.telemetry.path.redis_streams import RedisQueue
from megascale.telemetry.path.run_id import run_name


def check_address(url: str) -> None:
    """ConfigError: no such address."""
    if not url.startswith(("redis://", "kafka://")):
        raise ConfigError(
            f"telemetry.queue is {url!r}; legal: redis://HOST:PORT/NAME, kafka://HOST:PORT/TOPIC, "
            "or nothing, for a store that reads the files itself"
        )


def open_queue(url: str, run_dir: Path) -> Queue:
    """A connection of its own to the queue of one run (`run_id.py`): runs may share an address. For
    one thread. ConfigError: no such address; QueueError: nobody is there."""
    check_address(url)
    run = run_name(run_dir)
    return RedisQueue(url, run=run) if url.startswith("redis://") else KafkaQueue(url, run=run)
