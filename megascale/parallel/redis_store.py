"""`RedisStore`: torch's key-value store on a Redis server (MegaScale 3.5).

torch's TCPStore lives in rank 0 and serves one request after another; the paper puts Redis in its
place, which outlives any rank. This store keeps torch's contract: a `get` or `wait` blocks until
the keys are there or the timeout has passed, an `add` on a missing key starts at zero, and all who
wait for a key are released by whoever sets it. How that looks on the server, and why nobody polls
it, is in `redis_commands.py`; what happens when a connection breaks, in `redis_connection.py`.

torch calls a store of Python from its own threads, with the interpreter's lock; the calls release
it while they wait. It finds two methods under the names of its C++ class (`deleteKey`,
`getNumKeys`), and reaches neither queues nor `list_keys` through a PrefixStore (torch 2.13), so
those work on this object alone. It holds the C++ half of a store only: the other half lives until
`close()`, in this file.

Invariant: every key of a start lies under one prefix, and goes with the last rank that closes, or
with its lifetime where a run dies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megascale.errors import LaunchError
from megascale.parallel.redis_commands import LIFETIME_S, keep_ms
from megascale.parallel.redis_connection import (
    RedisConnections,
    RedisLostError,
    RedisRefusedError,
)

_OPEN: list[RedisStore] = []
_NAMED = 8  # missing keys that an error tells
Value = str | bytes


class RedisStore(dist.Store):
    """The store of one start of a run; one for each rank, for any number of threads.

    Calls raise torch's DistStoreError: a wait that timed out, which names the keys that are missing
    or a server that is lost, with how long it was tried.
    """

    timeout: timedelta  # of torch's class, which does not declare it

    def __init__(self, connections: RedisConnections, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._connections = connections
        _OPEN.append(self)

    @classmethod
    def open(
        cls, address: str, start: str, *, rank: int, world_size: int, timeout_s: float
    ) -> RedisStore:
        """Connect, and take the rank's place in the start named `start`.

        address  redis://[USER:PASSWORD@]HOST:PORT/DATABASE, or rediss:// for TLS
        start    one name for all ranks, another one each time that they are started
        Raises LaunchError: no server there (with how long it was tried), or the place is taken.
        ConfigError: no such address. MissingExtraError: redis-py is not installed.
        """
        connections = RedisConnections(address, start, rank=rank)
        try:
            held = connections.open(world_size, time.monotonic() + timeout_s)
        except (RedisLostError, RedisRefusedError) as error:
            connections.close()
            raise LaunchError(
                f"rank {rank} of {world_size} cannot use Redis at {connections.where}: {error}; "
                f"{_advice(str(error))}"
            ) from None
        if held:
            connections.close()
            raise LaunchError(
                f"rank {rank} of {world_size} cannot join start {start!r} at {connections.where}, "
                f"which has {_told(held, rank)}; each start needs a name of its own: stop the "
                "other job, or set MEGASCALE_START to a new word, the same on every rank"
            )
        return cls(connections, timedelta(seconds=timeout_s))

    @property
    def where(self) -> str:
        """The server's address, without a password."""
        return self._connections.where

    # ------------------------------------------------------------ values

    def set(self, key: str, value: Value) -> None:
        self._run("set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set of {len(keys)} keys and {len(values)} values")
        if keys:
            pairs = zip(keys, values, strict=True)
            self._run("set", *(part for pair in pairs for part in pair))

    def get(self, key: str) -> bytes:
        deadline_s = self._deadline_s()
        while True:
            answer = self._run("get", self._keep_ms(deadline_s), key, deadline_s=deadline_s)
            if isinstance(answer, bytes):
                return answer
            self._wait_behind([(key, answer[0])], deadline_s)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        deadline_s = self._deadline_s()
        while keys:
            keep = self._keep_ms(deadline_s)
            found, missing = self._run("multi_get", keep, *keys, deadline_s=deadline_s)
            if not missing:
                return found
            self._wait_behind(_pairs(missing), deadline_s)
        return []

    def append(self, key: str, value: Value) -> None:
        self._change("append", key, value)

    def add(self, key: str, amount: int) -> int:
        if amount == 0:
            with self._errors():
                value = self._connections.read(key, self._deadline_s())
            if value is not None and value.lstrip(b"-").isdigit():
                return int(value)
        return int(self._change("add", key, amount))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        return self._change("compare_set", key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._change("delete", key) > 0

    def check(self, keys: Sequence[str]) -> bool:
        return not self._run("missing", *keys) if keys else True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline_s = self._deadline_s(timeout)
        if keys:
            missing = self._run("wait", self._keep_ms(deadline_s), *keys, deadline_s=deadline_s)
            self._wait_behind(_pairs(missing), deadline_s, timeout)

    def num_keys(self) -> int:
        return self._run("count")

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._run("list") if key != b"\0"]

    # ------------------------------------------------------------ queues

    def queue_push(self, key: str, value: Value) -> None:
        self._change("queue_push", key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline_s = self._deadline_s()
        while True:
            answer = self._change(
                "queue_pop", key, self._keep_ms(deadline_s), deadline_s=deadline_s
            )
            if isinstance(answer, bytes):
                return answer
            if not block:
                raise dist.QueueEmptyError(f"queue {key} of the store at {self.where} is empty")
            self._wait_behind([(key, answer[0])], deadline_s)

    def queue_len(self, key: str) -> int:
        return self._run("queue_len", key)

    # ------------------------------------------------------------ what torch asks of the object

    def deleteKey(self, key: str) -> bool:  # torch's name
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # torch's name
        return self.num_keys()

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RedisStore:
        """The same store with a timeout of its own; connections are shared."""
        return RedisStore(self._connections, self.timeout)

    def close(self) -> None:
        """Leave the start; the last rank of its world takes all keys along. Clones end with it."""
        connections = self._connections
        try:
            with self._errors():
                connections.run(
                    "close", connections.rank, connections.opener, deadline_s=time.monotonic()
                )
        finally:
            connections.close()
            _OPEN[:] = [store for store in _OPEN if store._connections is not connections]

    # ------------------------------------------------------------ calls

    def _deadline_s(self, timeout: timedelta | None = None) -> float:
        wait_s = (self.timeout if timeout is None else timeout).total_seconds()
        return time.monotonic() + (wait_s if wait_s > 0 else LIFETIME_S)  # 0: torch's "no timeout"

    def _keep_ms(self, deadline_s: float) -> int:
        return keep_ms(max(deadline_s - time.monotonic(), 0.0))

    def _run(self, script: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        with self._errors():
            until_s = self._deadline_s() if deadline_s is None else deadline_s
            return self._connections.run(script, *arguments, deadline_s=until_s)

    def _change(self, script: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        with self._errors():
            until_s = self._deadline_s() if deadline_s is None else deadline_s
            return self._connections.change(script, *arguments, deadline_s=until_s)

    def _wait_behind(
        self,
        missing: Sequence[tuple[str, bytes]],
        deadline_s: float,
        timeout: timedelta | None = None,
    ) -> None:
        """Until each of the keys has changed since it was missing. One connection waits for the
        last one; when that has come most of the others have too, and one question finds out."""
        left = list(missing)
        while left:
            *others, (key, entry) = left
            with self._errors():
                if not self._connections.wait_behind(key, entry, deadline_s):
                    self._raise_timeout([name for name, _ in left], timeout)
            flat = [part for pair in others for part in pair]
            left = _pairs(self._run("unchanged", *flat, deadline_s=deadline_s)) if flat else []

    def _raise_timeout(self, keys: Sequence[str], timeout: timedelta | None) -> None:
        missing = [key.decode() for key in self._run("missing", *keys)] or list(keys)
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        wait = self.timeout if timeout is None else timeout
        raise dist.DistStoreError(
            f"wait timeout after {wait.total_seconds() * 1000:.0f}ms, keys: "
            f"{', '.join(missing[:_NAMED])}{more}: nobody set them in the store at {self.where}"
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (RedisLostError, RedisRefusedError) as error:
            raise dist.DistStoreError(f"the store at {self.where}: {error}") from None


def _pairs(flat: Sequence[bytes]) -> list[tuple[str, bytes]]:
    return [(key.decode(), entry) for key, entry in zip(flat[::2], flat[1::2], strict=True)]


def _told(held: str, rank: int) -> str:
    kind, _, number = held.partition(" ")
    return f"a world of {number}" if kind == "world" else f"a rank {rank} already"


def _advice(error: str) -> str:
    if "max number of clients" in error:
        return "raise the server's maxclients above the number of ranks"
    return "start redis-server there, correct comm.redis_address, or set comm.init_store=tcp"
