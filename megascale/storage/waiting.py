"""Waiting for a disk or a network that may never answer: in threads which can be left behind.

A read from a server that is gone sleeps in the kernel, and no signal ends it. So what may stall
runs on a daemon thread, and who asked waits for its progress: none for `stall_s` is a StorageError,
and the thread is left to its fate with the buffers that it holds. Threads start with each call
(0.1 ms): a pool would be lost at a fork, and a stuck thread in it would be met again.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from megascale.errors import StorageError

T = TypeVar("T")
DEFAULT_STALL_S = 60.0
_thread_numbers = itertools.count()


class Stalled(StorageError):
    """A thread is still in there, with its buffers and descriptors."""


@dataclass(frozen=True)
class _Moved:
    num_bytes: int


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


def answer(call: Callable[[], T], *, doing: str, stall_s: float) -> T:
    """The result of `call`; StorageError where it does not end within `stall_s`."""
    results: list[T] = []

    def move(_: None) -> int:
        results.append(call())
        return 0

    move_all([None], move, doing=doing, stall_s=stall_s)
    return results[0]


def move_all(
    items: Iterable[T],
    move: Callable[[T], int],
    *,
    doing: str,
    stall_s: float,
    num_threads: int = 1,
    moved: Callable[[int], None] = lambda _: None,
) -> None:
    """`move` each of `items`, by `num_threads` at once; returns when all are done.

    `move` returns how many bytes it moved; `moved` hears of them on the caller's thread. The first
    error ends it once the other threads have ended. `doing` opens the message of a stall.
    """
    heard: queue.SimpleQueue[_Moved | _Ended] = queue.SimpleQueue()
    stop = threading.Event()
    taken = _taken_one_by_one(items)

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in taken:
                heard.put(_Moved(move(item)))
                if stop.is_set():
                    break
        except BaseException as caught:  # noqa: BLE001  it is raised again on the caller's thread
            error = caught
            stop.set()
        heard.put(_Ended(error))

    for _ in range(num_threads):
        name = f"storage-{next(_thread_numbers)}"
        threading.Thread(target=work, daemon=True, name=name).start()
    try:
        error = _hear(heard, num_threads, moved, doing, stall_s)
    finally:
        stop.set()
    if error is not None:
        raise error


def _hear(
    heard: queue.SimpleQueue[_Moved | _Ended],
    num_threads: int,
    moved: Callable[[int], None],
    doing: str,
    stall_s: float,
) -> BaseException | None:
    """The first error of the threads, when all have ended."""
    num_bytes = 0
    first: BaseException | None = None
    while num_threads:
        try:
            message = heard.get(timeout=stall_s)
        except queue.Empty:
            raise Stalled(stall_message(doing, stall_s, num_bytes)) from first
        if isinstance(message, _Ended):
            num_threads -= 1
            first = first or message.error
        else:
            num_bytes += message.num_bytes
            moved(message.num_bytes)
    return first


def stall_message(doing: str, stall_s: float, num_bytes: int) -> str:
    """`doing` "writing step-00000100/rank-00000.safetensors to /mnt/runs"."""
    return (
        f"{doing}: no progress for {stall_s:g} s, after {num_bytes:,} bytes; see whether the disk "
        "or the server behind it answers. What was committed before is untouched"
    )


def _taken_one_by_one(items: Iterable[T]) -> Iterator[T]:
    """`items` for several threads, none given twice."""
    source = iter(items)
    lock = threading.Lock()
    end = object()

    class Taken:
        def __iter__(self) -> Iterator[T]:
            return self

        def __next__(self) -> T:
            with lock:
                item = next(source, end)
            if item is end:
                raise StopIteration
            return item  # type: ignore[return-value]

    return Taken()
