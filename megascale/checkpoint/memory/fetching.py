"""Values of a slot into live storage, by several threads at once, checked on the way.

A thread takes a chunk of 16 MiB, gets it (from a file that is mapped here, or from a keeper over a
connection of its own), hashes it, and puts it in place; on CUDA it goes through two buffers of
pinned memory, so that one is copied to the device while the other fills. Which thread takes which
chunk does not matter, so a slow path carries less. No slot is made for it: sizing one for 42 GB
takes 11 s (3.8 GB/s measured), which training need not wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megascale.checkpoint.memory.body import Body, Filling
from megascale.checkpoint.memory.hashing import (
    CHUNK_BYTES,
    chunks_of,
    hash_of_chunk,
    hash_of_chunks,
)
from megascale.checkpoint.memory.serving import Connection
from megascale.errors import CheckpointError

MIN_THREADS, MAX_THREADS = 4, 8


class Source(Protocol):
    """Bytes [start, start + num_bytes) of the body; asked for in order, taken in that order."""

    def ask(self, start: int, num_bytes: int) -> None: ...

    def take(self, start: int, buffer: Tensor, /) -> Tensor:
        """They, in `buffer` (as large), or where they are."""

    def close(self) -> None: ...


class Mapped:
    """Of a slot that is mapped here. On CUDA through the buffer: from pinned memory the device
    copies by itself, beside what this thread does next."""

    def __init__(self, values: Tensor, *, in_buffer: bool) -> None:
        self._values, self._in_buffer = values, in_buffer

    def ask(self, start: int, num_bytes: int) -> None:
        pass

    def take(self, start: int, buffer: Tensor) -> Tensor:
        values = self._values[start : start + len(buffer)]
        return buffer.copy_(values) if self._in_buffer else values

    def close(self) -> None:
        pass


class Sent:
    """Of a slot file of another process, whose values start at byte `first`."""

    def __init__(self, connection: Connection, first: int) -> None:
        self._connection, self._first = connection, first

    def ask(self, start: int, num_bytes: int) -> None:
        self._connection.ask(self._first + start, num_bytes)

    def take(self, _start: int, buffer: Tensor) -> Tensor:
        self._connection.take(buffer)
        return buffer

    def close(self) -> None:
        self._connection.close()


def fill(
    body: Body,
    open_source: Callable[[int], Source],
    *,
    body_hash: str | None,
    num_threads: int,
    device: torch.device,
) -> None:
    """Fill the pieces of `body`. Raises CheckpointError where a source ends, or where the values
    have another hash than `body_hash` (None: they were checked already); pieces are half filled
    then.

    open_source  one for each of `num_threads`, by number
    """
    chunks = chunks_of(body.num_bytes)
    hashes = [0] * len(chunks)
    filling, numbers = body.filling(), _Numbers(len(chunks))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # whoever still writes to the pieces

    def work(thread: int) -> None:
        if device.index is not None:
            torch.cuda.set_device(device)  # a thread starts on the first
        lane, source = _Lane(device), open_source(thread)
        try:
            number = numbers.take()
            if number is not None:
                source.ask(*_span(chunks[number]))
            while number is not None:
                start, num_bytes = _span(chunks[number])
                values = source.take(start, lane.buffer(num_bytes))
                following = numbers.take()
                if following is not None:  # it comes while this one is hashed
                    source.ask(*_span(chunks[following]))
                if body_hash is not None:
                    hashes[number] = hash_of_chunk(values)
                lane.put(filling, start, values)
                number = following
            lane.finish()
        finally:
            numbers.stop()  # all are taken, or one thread failed: the others need not go on
            source.close()

    num_threads = max(1, min(num_threads, len(chunks)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="slot-fill") as pool:
        for done in [pool.submit(work, thread) for thread in range(num_threads)]:
            done.result()
    filling.finish()
    if body_hash is not None and hash_of_chunks(hashes, body.num_bytes) != body_hash:
        raise CheckpointError("what came from the keeper is not what was saved (another hash)")


def _span(chunk: tuple[int, int]) -> tuple[int, int]:
    return chunk[0], chunk[1] - chunk[0]


class _Numbers:
    """0, 1, ... for several threads, each once."""

    def __init__(self, stop: int) -> None:
        self._numbers: Iterator[int] = iter(range(stop))
        self._lock = threading.Lock()

    def take(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)

    def stop(self) -> None:
        with self._lock:
            self._numbers = iter(())


class _Lane:
    """The way of one thread to the device: buffers in turn, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.on_device else None
        num = 2 if self.on_device else 1
        self._buffers = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self.on_device)
            for _ in range(num)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * num
        self._next = 0

    def buffer(self, num_bytes: int) -> Tensor:
        """The next one; what was in it is on the device."""
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        return self._buffers[self._next][:num_bytes]

    def put(self, filling: Filling, start: int, values: Tensor) -> None:
        context: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            context = torch.cuda.stream(self._stream)
        with context:
            filling.put(start, values)
            if self._stream is not None:
                self._copied[self._next] = self._stream.record_event()
        self._next = (self._next + 1) % len(self._buffers)

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
