"""Connections to a Redis server that wait with a deadline, and come back when they break.

A call takes an idle connection, or a new one: a thread that waits holds up no other, and a rank
whose threads never wait at once has one. redis-py speaks the protocol; its own repetitions are off,
because a change must say that it is sent again (`redis_commands.py`).

A connection that breaks is made again for at most RECONNECT_S, and no longer than the call's
deadline. What answers then must still know this store: a server that was restarted without what it
held would let everybody wait for keys that are gone.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from megascale.config.comm import without_password
from megascale.errors import ConfigError, require_extra
from megascale.parallel.redis_commands import (
    LIFETIME_S,
    Argument,
    block_command,
    in_full,
    read_command,
    run_prefix,
    script_command,
)

RECONNECT_S = 15.0  # how long a connection that does not come about is tried for
ATTEMPT_S = 5.0  # of that, a single attempt
ANSWER_S = 5.0  # a command may take so long even where its call's deadline is nearer
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_jitter = random.SystemRandom()  # the run's own random numbers stay as they are
_log = logging.getLogger(__name__)


class RedisLostError(Exception):
    """Nobody answers at the address, or the answer did not come."""


class RedisRefusedError(Exception):
    """An answer that trying again does not mend."""


class _Link:
    """One connection by a name that outlives it, and how many changes it has made."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.name, self.changes = uuid.uuid4().hex, 0


class RedisConnections:
    """Calls on one start's store. Every call raises RedisLostError or RedisRefusedError.

    opener  what the server must still know this store's rank by when a connection is made again
    """

    def __init__(self, address: str, start: str, *, rank: int) -> None:
        try:
            import redis
        except ImportError:
            raise require_extra("redis", "telemetry") from None
        self._errors: Any = redis.exceptions
        self.where, self.rank, self.opener = without_password(address), rank, uuid.uuid4().hex
        self._prefix = run_prefix(start)
        try:
            self._pool: Any = redis.ConnectionPool.from_url(
                address,
                max_connections=2**31,  # one for each thread that waits
                protocol=2,
                socket_timeout=ATTEMPT_S,
                socket_connect_timeout=ATTEMPT_S,
                socket_keepalive=True,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), retries=0),
            )
        except ValueError as error:
            raise ConfigError(
                f"comm.redis_address is {self.where!r}: {error}; legal: redis://HOST:PORT/DATABASE"
            ) from None
        self._idle: list[_Link] = []
        self._lock = threading.Lock()
        self._closed = False
        self._touched_s = time.monotonic()

    def open(self, world_size: int, deadline_s: float) -> str:
        """Connect and take this rank's place; what another one holds there, or nothing."""
        link = self._new_link(deadline_s, known=False)
        arguments = (self.rank, self.opener, world_size, LIFETIME_S)
        command = script_command(self._prefix, "open", *arguments)
        answer = self._exchange(link, command, "open", deadline_s)
        self._idle.append(link)
        return answer.decode()

    def run(self, script: str, *arguments: Argument, deadline_s: float) -> Any:
        """The answer to a script that may run twice."""
        command = script_command(self._prefix, script, *arguments)
        return self._call(lambda _link, _again: command, script, deadline_s)

    def change(self, script: str, *arguments: Argument, deadline_s: float) -> Any:
        """The answer to a script that must run once, however often it is sent."""

        def command(link: _Link, again: bool) -> Sequence[Argument]:
            link.changes += not again
            own = (link.name, link.changes, int(again))
            return script_command(self._prefix, script, *own, *arguments)

        return self._call(command, script, deadline_s)

    def read(self, key: str, deadline_s: float) -> bytes | None:
        """The value of `key` where it is there."""
        command = read_command(self._prefix, key)
        value: bytes | None = self._call(lambda _link, _again: command, "read", deadline_s)
        return value

    def wait_behind(self, key: str | bytes, entry: bytes, deadline_s: float) -> bool:
        """Whether `key` changed before the deadline; waits on the server."""

        def command(_link: _Link, _again: bool) -> Sequence[Argument]:
            return block_command(self._prefix, key, entry, deadline_s - time.monotonic())

        return self._call(command, "", deadline_s) is not None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.connection.disconnect()

    # ------------------------------------------------------------ one call

    def _call(
        self, command: Callable[[_Link, bool], Sequence[Argument]], script: str, deadline_s: float
    ) -> Any:
        link = self._take() or self._new_link(deadline_s, known=True)
        self._touch(link)
        again = False
        while True:
            try:
                answer = self._exchange(link, command(link, again), script, deadline_s)
            except RedisLostError as error:
                _log.warning("Redis at %s: %s; connecting again", self.where, error)
                self._connect(link, deadline_s, known=True)
                again = True
                continue
            except RedisRefusedError:
                self._give_back(link)
                raise
            self._give_back(link)
            return answer

    def _take(self) -> _Link | None:
        with self._lock:
            if self._closed:
                raise RedisRefusedError("this store is closed")
            return self._idle.pop() if self._idle else None

    def _give_back(self, link: _Link) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        link.connection.disconnect()

    def _new_link(self, deadline_s: float, *, known: bool) -> _Link:
        link = _Link(self._pool.make_connection())
        self._connect(link, deadline_s, known=known)
        return link

    def _touch(self, link: _Link) -> None:
        """Now and then: what a long run left there is still wanted."""
        if time.monotonic() - self._touched_s > LIFETIME_S / 100:
            self._touched_s = time.monotonic()
            arguments = (self.rank, self.opener, LIFETIME_S)
            command = script_command(self._prefix, "touch", *arguments)
            with suppress(RedisLostError):  # the call itself comes to the same, and tries again
                self._exchange(link, command, "touch", time.monotonic())

    def _exchange(
        self, link: _Link, command: Sequence[Argument], script: str, deadline_s: float
    ) -> Any:
        """Send, and wait for the answer until the deadline and at least ANSWER_S."""
        wait_s = max(deadline_s - time.monotonic(), 0.0)
        blocks = not script
        patience_s = wait_s + ANSWER_S if blocks else max(wait_s, ANSWER_S)
        try:
            link.connection.send_command(*command, check_health=False)
            if not link.connection.can_read(timeout=patience_s):
                raise RedisLostError(f"no answer to {command[0]!s} {script} in {patience_s:.1f} s")
            return link.connection.read_response()
        except self._errors.NoScriptError:
            return self._exchange(link, in_full(command, script), script, deadline_s)
        except self._errors.AuthenticationError as error:
            raise RedisRefusedError(f"the password in the address is refused: {error}") from None
        except (self._errors.ConnectionError, self._errors.TimeoutError, OSError) as error:
            raise RedisLostError(str(error)) from None
        except self._errors.InvalidResponse as error:
            raise RedisRefusedError(f"what answers there is no Redis: {error}") from None
        except self._errors.RedisError as error:
            raise RedisRefusedError(f"{command[0]!s} {script}: {error}") from None

    def _connect(self, link: _Link, deadline_s: float, *, known: bool) -> None:
        """Connect, again where it was connected before. All ranks may do this at once, so pauses
        grow and differ.

        known  the server must remember this store
        """
        start_s = time.monotonic()
        until_s = min(max(deadline_s, start_s), start_s + RECONNECT_S)
        pause_s = _PAUSE_S
        while True:
            link.connection.disconnect()
            try:
                self._exchange(link, ["PING"], "PING", time.monotonic())
                break
            except RedisLostError as error:
                if time.monotonic() >= until_s:
                    took_s = time.monotonic() - start_s
                    raise RedisLostError(f"{error}; tried for {took_s:.1f} s") from None
            time.sleep(min(pause_s * _jitter.uniform(0.5, 1.5), max(until_s - time.monotonic(), 0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if known:
            self._check_memory(link, deadline_s)

    def _check_memory(self, link: _Link, deadline_s: float) -> None:
        arguments = (self.rank, self.opener, LIFETIME_S)
        command = script_command(self._prefix, "touch", *arguments)
        if self._exchange(link, command, "touch", deadline_s) != 1:
            raise RedisRefusedError(
                "the server does not know this run any more: it was restarted without its data, or "
                "somebody emptied it; start the run again (redis-server --appendonly yes survives "
                "a restart)"
            )
