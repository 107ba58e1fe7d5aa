"""The wire to the driver: JSON over HTTP, one connection a thread (`messages.py`).

Nothing waits without an end, and no proxy of the environment is used. LinkError: the driver did
not hear, or could not answer; the same may succeed later. RefusedError: it heard and said no.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from megascale.cluster.messages import (
    BODY_BYTES,
    POLL_S,
    Command,
    Heard,
    Heartbeat,
    Join,
    Joined,
    Result,
)
from megascale.errors import LaunchError, require_extra

if TYPE_CHECKING:
    import httpx

JOIN_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
_POLL_MARGIN_S = 5.0
_COMMANDS = TypeAdapter(list[Command])
_FINAL = (400, 401, 403, 413, 422)
_Reply = TypeVar("_Reply", bound=BaseModel)


class LinkError(Exception):
    """No answer, or none that can be understood."""


class RefusedError(LaunchError):
    """The driver will not have this message, however often it is asked.

    is_final  it will not have this agent: it was evicted, or another has its place
    """

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class Link:
    """One connection to the driver; for one thread.

    Raises LaunchError where the token cannot be read.
    """

    def __init__(self, driver_url: str, token_file: Path) -> None:
        try:
            import httpx
        except ImportError:
            raise require_extra("httpx", "cluster") from None
        if not driver_url.startswith(("http://", "https://")):
            raise LaunchError(f"--driver is {driver_url!r}; it must be http://HOST:PORT")
        self._httpx = httpx
        self._url, self._token_file = driver_url.rstrip("/"), token_file
        self._client = httpx.Client(
            base_url=self._url,
            headers={"Authorization": f"Bearer {self._token()}"},
            trust_env=False,
            timeout=httpx.Timeout(JOIN_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )

    def join(self, message: Join) -> Joined:
        self._client.headers["Authorization"] = f"Bearer {self._token()}"  # it may be a new driver
        return self._post("/v1/join", message, Joined, JOIN_TIMEOUT_S)

    def heartbeat(self, message: Heartbeat, timeout_s: float) -> Heard:
        return self._post("/v1/heartbeat", message, Heard, timeout_s)

    def result(self, message: Result) -> Heard:
        return self._post("/v1/results", message, Heard, JOIN_TIMEOUT_S)

    def commands(self, node: str, incarnation: str, after: int) -> list[Command]:
        """Waits at the driver for what comes after sequence number `after`; empty at its end."""
        query = {"node": node, "incarnation": incarnation, "after": after}
        reply = self._send("GET", "/v1/commands", POLL_S + _POLL_MARGIN_S, params=query)
        try:
            return _COMMANDS.validate_json(reply.content)
        except ValidationError as error:
            raise LinkError(f"commands that this agent does not know: {error}") from None

    def close(self) -> None:
        self._client.close()

    def _post(self, path: str, message: BaseModel, reply: type[_Reply], timeout_s: float) -> _Reply:
        body = message.model_dump_json(exclude_none=True).encode()
        answer = self._send("POST", path, timeout_s, content=body)
        try:
            return reply.model_validate_json(answer.content)
        except ValidationError as error:
            raise LinkError(f"{path} was answered with something else: {error}") from None

    def _send(self, method: str, path: str, timeout_s: float, **rest: Any) -> httpx.Response:
        timeout = self._httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        headers = {"Content-Type": "application/json"} if method == "POST" else {}
        try:
            answer = self._client.request(method, path, timeout=timeout, headers=headers, **rest)
        except self._httpx.HTTPError as error:
            raise LinkError(f"{self._url}{path}: {str(error) or type(error).__name__}") from None
        if answer.status_code in _FINAL:
            raise RefusedError(
                f"the driver at {self._url} refuses {path} with {answer.status_code}: "
                f"{answer.text[:500]}; it must be of the same version, and --token-file its own",
                is_final=answer.status_code == 403,
            )
        if answer.status_code != 200:
            raise LinkError(f"{self._url}{path}: {answer.status_code} {answer.text[:200]}")
        return answer

    def _token(self) -> str:
        try:
            return self._token_file.read_text().strip()
        except OSError as error:
            raise LaunchError(
                f"the token {self._token_file} cannot be read ({error.strerror}); --token-file "
                "names the file that the driver wrote"
            ) from None


def fits(message: BaseModel) -> bool:
    """Whether the driver would read it."""
    return len(message.model_dump_json(exclude_none=True)) <= BODY_BYTES


class Backoff:
    """Waits that double up to a bound, each between half and whole, so that agents spread."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s, self._next_s = first_s, most_s, first_s

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return wait_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = self._first_s


class SeldomLog:
    """A warning that repeats is written once in `every_s`, with how often it came."""

    def __init__(self, log: logging.Logger, every_s: float = 30.0) -> None:
        self._log, self._every_s = log, every_s
        self._said_s, self._unsaid = -every_s, 0

    def warn(self, text: str, *values: object) -> None:
        self._unsaid += 1
        now_s = time.monotonic()
        if now_s - self._said_s < self._every_s:
            return
        times = f" ({self._unsaid} times)" if self._unsaid > 1 else ""
        self._log.warning(text + "%s", *values, times)
        self._said_s, self._unsaid = now_s, 0
