"""`megascale stream`: the streamer of a node, the store, or both, in the foreground.

Each is a thread with a connection of its own. Without a queue between machines they share one in
this process. A queue that cannot be reached, or a store that somebody else writes, is waited for; a
defect of ours in either ends the process, and whoever started it starts it again: nothing is lost
by that.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from megascale.config import TelemetryConfig, load_config
from megascale.errors import ConfigError, DataError
from megascale.telemetry.path.connect import check_address, open_queue
from megascale.telemetry.path.local import LocalQueue
from megascale.telemetry.path.queue import Queue, QueueError
from megascale.telemetry.path.streamer import Streamer
from megascale.telemetry.store.process import run_store
from megascale.telemetry.store.segments import store_folder

AGAIN_S = 2.0  # after a queue that is not there
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Streamed:
    """What was done: bytes that this streamer published, segments that this store committed."""

    num_bytes: int
    num_segments: int


class Stream:
    """One process' part of the path; `run` until `end`."""

    def __init__(
        self,
        run_dir: Path,
        config: TelemetryConfig,
        *,
        streams: bool = True,
        stores: bool = True,
        ranks: Collection[int] | None = None,
    ) -> None:
        if not config.queue and not (streams and stores):
            raise ConfigError(
                "without a queue streamer and store are one process; give --queue, or neither "
                "--no-store nor --no-files"
            )
        if not run_dir.is_dir():
            raise DataError(f"{run_dir} is no folder; give the folder of a run")
        self._run_dir, self._config, self._ranks = run_dir, config, ranks
        self._streams, self._stores = streams, stores
        self._local = None if config.queue else LocalQueue()
        self._ended, self._streamed = threading.Event(), threading.Event()
        if config.queue:
            check_address(config.queue)

    def run(self) -> Streamed:
        """Raises what any of the threads raised."""
        with ThreadPoolExecutor(2, thread_name_prefix="stream") as pool:
            streaming = pool.submit(self._guarded, self._stream) if self._streams else None
            storing = pool.submit(self._guarded, self._store) if self._stores else None
            while wait([part for part in (streaming, storing) if part], timeout=1.0).not_done:
                pass
        return Streamed(streaming.result() if streaming else 0, storing.result() if storing else 0)

    def end(self) -> None:
        """Soon: what is written by now is streamed, what is streamed is stored."""
        self._ended.set()

    def _guarded(self, act: Callable[[], int]) -> int:
        try:
            return act()
        finally:
            self._ended.set()  # one does not go on without the other

    def _stream(self) -> int:
        queue = self._connect()
        if queue is None:
            return 0
        streamer = Streamer(self._run_dir, queue, ranks=self._ranks)
        try:
            streamer.run(self._ended)
        finally:
            self._streamed.set()
            if self._local is None:
                queue.close()
        return streamer.num_bytes

    def _store(self) -> int:
        queue = self._connect()
        if queue is None:
            return 0
        return run_store(
            store_folder(self._run_dir),
            queue,
            self._streamed if self._local is not None else self._ended,
            keep_bytes=self._config.keep_gb * 1e9,
            keep_s=self._config.keep_days * 86_400,
        )

    def _connect(self) -> Queue | None:
        """The queue, as soon as it is there; None at the end."""
        if self._local is not None:
            return self._local
        is_told = False
        while True:
            try:
                queue = open_queue(self._config.queue, self._run_dir)
                queue.generation()
                return queue
            except QueueError as error:
                if not is_told:
                    _log.warning("%s; waiting for it", error)
                is_told = True
            if self._ended.wait(AGAIN_S):
                return None


def telemetry_config(run_dir: Path, queue: str | None = None) -> TelemetryConfig:
    """That of the run, with another queue where one is given; the defaults for a run without a
    configuration."""
    file = run_dir / "config.json"
    config = load_config(file).telemetry if file.exists() else TelemetryConfig()
    if queue is None:
        return config
    return config.model_copy(update={"queue": queue})


def stream_until_signal(stream: Stream) -> Streamed:
    """In the main thread: SIGTERM and SIGINT end it in order, a second one at once."""

    def on_signal(signum: int, _frame: object) -> None:
        signal.signal(signum, signal.SIG_DFL)
        stream.end()

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        return stream.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing() -> int:
    return 0
