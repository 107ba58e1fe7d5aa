"""In front of FastAPI: who may speak, how much, and the short way of heartbeats.

A token is compared in constant time before anything is read. A body is counted while it comes and
dropped at BODY_BYTES, whatever Content-Length says. A heartbeat goes from here to the desk: at
1,536 nodes a second routing and response models would cost more than all the rest.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pydantic import ValidationError

from megascale.cluster.driver.desk import Desk
from megascale.cluster.driver.refusals import RefusedError
from megascale.cluster.messages import BODY_BYTES, Heartbeat

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """ASGI. `inner` is the FastAPI app."""

    def __init__(self, inner: App, desk: Desk, token: str) -> None:
        self._inner, self._desk = inner, desk
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            self._desk.refusals.note("HTTP 401", f"{scope['path']} from {scope.get('client')}")
            detail = "this needs the header Authorization: Bearer TOKEN, with the driver's token"
            await answer(send, 401, {"detail": detail})
            return
        try:
            body = await self._read(receive, headers)
        except _GoneError:
            return
        if body is None:
            self._desk.refusals.note("HTTP 413", scope["path"])
            detail = f"the body is larger than {BODY_BYTES} bytes; send less"
            await answer(send, 413, {"detail": detail})
        elif scope["path"] == "/v1/heartbeat" and scope["method"] == "POST":
            await self._heartbeat(body, send)
        else:
            await self._inner(scope, _Replay(body, receive), send)

    async def _read(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes | None:
        """The whole body; None where it is too large."""
        try:
            if int(headers.get(b"content-length", b"0")) > BODY_BYTES:
                return None
        except ValueError:
            return None
        parts: list[bytes] = []
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > BODY_BYTES:
                return None
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _heartbeat(self, body: bytes, send: Send) -> None:
        try:
            message = Heartbeat.model_validate_json(body)
            heard = self._desk.heartbeat(message)
        except ValidationError as error:
            self._desk.refusals.note("HTTP 422", "/v1/heartbeat")
            await answer(send, 422, {"detail": readable(error)})
        except RefusedError as error:
            await answer(send, error.status, {"detail": error.detail})
        else:
            await answer_bytes(send, 200, heard.model_dump_json().encode())


class _GoneError(Exception):
    """The client went away in the middle of its request."""


class _Replay:
    """`receive` with the body that was read already, then what comes: the client may go."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def readable(error: ValidationError) -> list[dict[str, Any]]:
    """Where and what, without the input: it may be large."""
    return [
        {"loc": list(one["loc"]), "msg": one["msg"], "type": one["type"]}
        for one in error.errors(include_url=False, include_input=False, include_context=False)[:20]
    ]


async def answer(send: Send, status: int, content: dict[str, Any]) -> None:
    await answer_bytes(send, status, json.dumps(content).encode())


async def answer_bytes(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
