"""What a simulated rank does: exchanges with a server, pauses, and marks of where it is.

A rank is a generator. It yields a `Request` and is sent what the request's reader makes of the
answer; it yields a `Pause` and is sent None when that has passed, a `Mark` and is sent None at
once. Who drives it (`clients.py`) knows sockets and nothing of stores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

Reader = Callable[[bytes], tuple[Any, int] | None]
"""(value, bytes of it) of an answer's beginning; None while it is incomplete."""


@dataclass(slots=True)
class Request:
    """Bytes to send. `read` is None where the server answers nothing."""

    data: bytes
    read: Reader | None


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Mark:
    """The rank has come so far. The time at which the last rank has is a result."""

    name: str


Step = Request | Pause | Mark
Steps = Generator[Step, Any, Any]


class Calls(Protocol):
    """The calls of a store as torch's client makes them, for one rank."""

    def join(self, rank: int, world_size: int) -> Steps:
        """What a client does before its first call."""
        ...

    def add(self, key: str, amount: int) -> Steps:
        """Gives the sum."""
        ...

    def set(self, key: str, value: bytes) -> Steps: ...

    def get(self, key: str) -> Steps:
        """Gives the value, when it is there."""
        ...

    def multi_get(self, keys: tuple[str, ...]) -> Steps:
        """Gives the values, when all are there."""
        ...

    def wait(self, key: str) -> Steps: ...
