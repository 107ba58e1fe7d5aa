"""Files of the run folder are read beside the thread that decides, in one thread at a time.

They lie on storage that all nodes share, and a file server that hangs answers no read: then nothing
new is read, and decisions go on. Of each name one reading is asked for, under way or not taken yet,
never more, so what waits is bounded by what one reading returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

SLOW_S = 30.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


def _in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="reading", daemon=True).start()  # may never end


@dataclass
class _Asked:
    of: Hashable
    read: Callable[[], Any]
    since_s: float
    future: Future[Any]
    is_told: bool = False


class Readings:
    """start  has what is given run beside the caller (tests: at once)"""

    def __init__(self, start: Callable[[Callable[[], None]], None] = _in_a_thread) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._asked: dict[str, _Asked] = {}  # the deciding thread's own
        self._waiting: deque[_Asked] = deque()
        self._is_running = False

    def ask(self, name: str, of: Hashable, read: Callable[[], object]) -> None:
        """Have `read` called, unless a reading of this name is not taken yet.

        of  what it is asked for: only who asks for the same is given it
        """
        if name in self._asked:
            return
        asked = self._asked[name] = _Asked(of, read, time.monotonic(), Future())
        with self._lock:
            self._waiting.append(asked)
            if self._is_running:
                return
            self._is_running = True
        self._start(self._work)

    def take(self, name: str, of: Hashable, wait_s: float = 0.0) -> Any:
        """What the reading returned, once; None while it has not, and where it was of another.

        Raises what the reading raised.
        """
        asked = self._asked.get(name)
        if asked is None:
            return None
        try:
            asked.future.exception(wait_s)
        except TimeoutError:
            self._tell(name, asked)
            return None
        del self._asked[name]
        found = asked.future.result()
        return found if asked.of == of else None

    def poll(self, name: str, of: Hashable, read: Callable[[], T]) -> T | None:
        """What was read since the last call; the next is asked for."""
        found: T | None = self.take(name, of)
        self.ask(name, of, read)
        return self.take(name, of) if found is None else found

    def _tell(self, name: str, asked: _Asked) -> None:
        waited_s = time.monotonic() - asked.since_s
        if waited_s > SLOW_S and not asked.is_told:
            asked.is_told = True
            _log.warning("%s has not been read for %.0f s; the job goes on", name, waited_s)

    def _work(self) -> None:
        """Until nobody waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                asked = self._waiting.popleft()
            try:
                asked.future.set_result(asked.read())
            except Exception as error:  # noqa: BLE001 - raised by whoever takes it
                asked.future.set_exception(error)
