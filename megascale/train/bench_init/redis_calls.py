"""The calls of a `RedisStore`: its own commands, in Redis's wire format (RESP2).

A `get` or `wait` for what is missing is answered with where to wait, and then blocks on the server
(`parallel/redis_commands.py`). What a real rank's first connection says before its first call is
said here too.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from megascale.parallel.redis_commands import (
    LIFETIME_S,
    Argument,
    block_command,
    keep_ms,
    read_command,
    run_prefix,
    script_command,
)
from megascale.train.bench_init.calls import Request, Steps

WAIT_S = 1800.0  # torch's default; nothing here comes near
_KEEP_MS = keep_ms(WAIT_S)


class ServerError(Exception):
    """The server answered with an error, which ends the measurement."""


class RedisCalls:
    """The connection's name and count make its changes once (`redis_connection.py`)."""

    def __init__(self, start: str) -> None:
        self._prefix = run_prefix(start)
        self._name, self._changes = uuid.uuid4().hex, 0

    def join(self, rank: int, world_size: int) -> Steps:
        for name, value in (("LIB-NAME", "redis-py"), ("LIB-VER", "8")):
            yield Request(encoded(["CLIENT", "SETINFO", name, value]), _read_any)
        yield Request(encoded(["PING"]), read_answer)
        arguments = (rank, self._name, world_size, LIFETIME_S)
        held = yield Request(self._script("open", *arguments), read_answer)
        assert held == b"", f"rank {rank} found {held!r}"

    def add(self, key: str, amount: int) -> Steps:
        if amount == 0:
            value = yield Request(_read(self._prefix, key), read_answer)
            if value is not None:
                return int(value)
        self._changes += 1
        own = (self._name, self._changes, 0)
        return (yield Request(self._script("add", *own, key, amount), read_answer))

    def set(self, key: str, value: bytes) -> Steps:
        yield Request(self._script("set", key, value), read_answer)

    def get(self, key: str) -> Steps:
        while True:
            answer = yield Request(_get(self._prefix, key), read_answer)
            if isinstance(answer, bytes):
                return answer
            yield from self._wait_behind([key, answer[0]])

    def multi_get(self, keys: tuple[str, ...]) -> Steps:
        while True:
            found, missing = yield Request(_multi_get(self._prefix, keys), read_answer)
            if not missing:
                return found
            yield from self._wait_behind(missing)

    def wait(self, key: str) -> Steps:
        missing = yield Request(_wait(self._prefix, key), read_answer)
        yield from self._wait_behind(missing)

    def _wait_behind(self, missing: Sequence[str | bytes]) -> Steps:
        """Pairs of a key and the entry to wait behind, as `RedisStore` waits for them."""
        while missing:
            *others, key, entry = missing
            assert isinstance(entry, bytes), entry
            command = block_command(self._prefix, key, entry, WAIT_S)
            changed = yield Request(encoded(command), read_answer)
            assert changed is not None, f"nobody set {key!r} in {WAIT_S} s"
            missing = others
            if others:
                missing = yield Request(self._script("unchanged", *others), read_answer)

    def _script(self, name: str, *arguments: Argument) -> bytes:
        return encoded(script_command(self._prefix, name, *arguments))


@lru_cache(maxsize=64)
def _read(prefix: str, key: str) -> bytes:
    return encoded(read_command(prefix, key))


@lru_cache(maxsize=64)
def _get(prefix: str, key: str) -> bytes:
    return encoded(script_command(prefix, "get", _KEEP_MS, key))


@lru_cache(maxsize=64)
def _multi_get(prefix: str, keys: tuple[str, ...]) -> bytes:
    return encoded(script_command(prefix, "multi_get", _KEEP_MS, *keys))


@lru_cache(maxsize=64)
def _wait(prefix: str, key: str) -> bytes:
    return encoded(script_command(prefix, "wait", _KEEP_MS, key))


def encoded(command: Sequence[Argument]) -> bytes:
    """A command as a client sends it."""
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        raw = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


def read_answer(data: bytes) -> tuple[Any, int] | None:
    """Raises ServerError."""
    found = _value(data, 0)
    if found is not None and isinstance(found[0], ServerError):
        raise found[0]
    return found


def _read_any(data: bytes) -> tuple[Any, int] | None:
    """Also an error: servers before 7.2 do not know what a client's library is."""
    return _value(data, 0)


def _value(data: bytes, start: int) -> tuple[Any, int] | None:
    """The value that begins at `start`, and where it ends."""
    end = data.find(b"\r\n", start)
    if end < 0:
        return None
    kind, line, after = data[start : start + 1], data[start + 1 : end], end + 2
    if kind == b":":
        return int(line), after
    if kind == b"+":
        return line, after
    if kind == b"-":
        return ServerError(line.decode()), after
    length = int(line)
    if length < 0:
        return None, after
    if kind == b"$":
        stop = after + length
        return (data[after:stop], stop + 2) if len(data) >= stop + 2 else None
    assert kind == b"*", f"an answer begins with {data[start : start + 20]!r}"
    items = []
    for _ in range(length):
        found = _value(data, after)
        if found is None:
            return None
        items.append(found[0])
        after = found[1]
    return items, after
