"""Work behind training, in a thread whose end is waited for where it matters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread that does not keep a process that fails from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name="memory-slots", daemon=True).start()
    return future
