"""The calls of torch's TCPStore, in its wire format (torch 2.11 and 2.13; `tests/` compare).

A request is a byte for the kind, then strings with their length in eight bytes. A `get` is two
requests, for it waits first, and so is a `multi_get`; a `set` has no answer. Every client says
hello with a number that all know and one of its own that is sent back; one that waits for its world
adds itself to a counter, which rank 0 reads every 10 ms.
"""

from __future__ import annotations

import struct
from functools import lru_cache, partial

from megascale.train.bench_init.calls import Pause, Request, Steps

_MAGIC = 0x3C85F7CE
_VALIDATE, _SET, _GET, _ADD, _WAIT, _MULTI_GET, _PING = 0, 1, 3, 4, 6, 10, 13
_COUNT_KEY = "init/"
_POLL_S = 0.01


class TcpCalls:
    def join(self, rank: int, world_size: int) -> Steps:
        hello = struct.pack("<BIBI", _VALIDATE, _MAGIC, _PING, rank)
        answer = yield Request(hello, _read_uint32)
        assert answer == rank, f"asked a TCPStore with {rank}, got {answer}"
        yield from self.add(_COUNT_KEY, 1)
        while rank == 0 and int((yield from self.get(_COUNT_KEY))) < world_size:
            yield Pause(_POLL_S)

    def add(self, key: str, amount: int) -> Steps:
        return (yield Request(_add(key, amount), _read_int64))

    def set(self, key: str, value: bytes) -> Steps:
        data = struct.pack("<B", _SET) + _string(key) + struct.pack("<Q", len(value)) + value
        yield Request(data, None)

    def get(self, key: str) -> Steps:
        yield from self.wait(key)
        return (yield Request(struct.pack("<B", _GET) + _string(key), _read_bytes))

    def multi_get(self, keys: tuple[str, ...]) -> Steps:
        yield from self._wait(keys)
        return (yield Request(_multi_get(keys), partial(_read_list, len(keys))))

    def wait(self, key: str) -> Steps:
        return self._wait((key,))

    def _wait(self, keys: tuple[str, ...]) -> Steps:
        stopped = yield Request(_wait(keys), _read_byte)
        assert stopped == 0, f"waiting for {keys} was answered {stopped}"


def _string(key: str) -> bytes:
    raw = b"/" + key.encode()
    return struct.pack("<Q", len(raw)) + raw


@lru_cache(maxsize=64)
def _add(key: str, amount: int) -> bytes:
    return struct.pack("<B", _ADD) + _string(key) + struct.pack("<q", amount)


@lru_cache(maxsize=64)
def _wait(keys: tuple[str, ...]) -> bytes:
    return struct.pack("<BQ", _WAIT, len(keys)) + b"".join(map(_string, keys))


@lru_cache(maxsize=64)
def _multi_get(keys: tuple[str, ...]) -> bytes:
    return struct.pack("<BQ", _MULTI_GET, len(keys)) + b"".join(map(_string, keys))


def _read_byte(data: bytes) -> tuple[int, int] | None:
    return (data[0], 1) if data else None


def _read_uint32(data: bytes) -> tuple[int, int] | None:
    return (int.from_bytes(data[:4], "little"), 4) if len(data) >= 4 else None


def _read_int64(data: bytes) -> tuple[int, int] | None:
    return (int.from_bytes(data[:8], "little", signed=True), 8) if len(data) >= 8 else None


def _read_bytes(data: bytes) -> tuple[bytes, int] | None:
    if len(data) < 8:
        return None
    end = 8 + int.from_bytes(data[:8], "little")
    return (data[8:end], end) if len(data) >= end else None


def _read_list(length: int, data: bytes) -> tuple[list[bytes], int] | None:
    values, end = [], 0
    for _ in range(length):
        found = _read_bytes(data[end:])
        if found is None:
            return None
        values.append(found[0])
        end += found[1]
    return values, end
