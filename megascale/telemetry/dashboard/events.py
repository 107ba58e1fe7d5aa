"""Server-sent events: what changed in the run, to every browser that looks.

The thread that refreshes the run publishes; each client has a bounded queue of its own. One that
does not read is dropped, not waited for, and its browser comes back by itself: the first thing it
is sent then is the newest state. So there is nothing to replay, and an event may be lost.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

MOST_CLIENTS = 256
MOST_WAITING = 32  # events of one client
KEEP_ALIVE_S = 10.0  # a comment, so that a dead connection is noticed
SEND_S = 10.0  # a client that takes longer is gone

_Message = MutableMapping[str, Any]
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class Client:
    """One browser: the events that it has not been sent yet; None is the end."""

    def __init__(self, first: list[str]) -> None:
        self.queue: asyncio.Queue[str | None] = asyncio.Queue(MOST_WAITING)
        for text in first[-MOST_WAITING:]:
            self.queue.put_nowait(text)

    def offer(self, text: str | None) -> bool:
        """Whether there was room; without, the client is at its end."""
        if text is not None and not self.queue.full():
            self.queue.put_nowait(text)
            return True
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(None)
        return text is None


class Hub:
    """Publishes to all clients. `publish` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, str] = {}
        self._clients: set[Client] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.num_dropped = 0

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def publish(self, kind: str, data: Mapping[str, Any]) -> None:
        body = json.dumps(data, separators=(",", ":"), allow_nan=False)
        text = f"event: {kind}\ndata: {body}\n\n"
        with self._lock:
            self._newest[kind] = text
            loop = self._loop
        self._in_loop(loop, text)

    def close(self) -> None:
        """Every stream ends, and no new one begins."""
        with self._lock:
            self._closed, loop = True, self._loop
        self._in_loop(loop, None)

    def subscribe(self) -> Client | None:
        """In the server's loop. None where there are too many already, or all is over."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            if self._closed or len(self._clients) >= MOST_CLIENTS:
                return None
            client = Client(list(self._newest.values()))
        self._clients.add(client)
        return client

    def leave(self, client: Client) -> None:
        self._clients.discard(client)

    def _in_loop(self, loop: asyncio.AbstractEventLoop | None, text: str | None) -> None:
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, text)

    def _deliver(self, text: str | None) -> None:
        for client in list(self._clients):
            if not client.offer(text):
                self._clients.discard(client)
                self.num_dropped += 1


class EventStream:
    """The ASGI answer of one client, until it goes, falls behind, or the server closes.

    Written against ASGI itself: a framework's streaming answer waits for a client that does not
    read as long as that client likes.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(
        self,
        _scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[_Message]],
        send: Callable[[_Message], Awaitable[None]],
    ) -> None:
        client = self._hub.subscribe()
        if client is None:
            await send({"type": "http.response.start", "status": 503, "headers": list(_HEADERS)})
            await send({"type": "http.response.body", "body": b": too many browsers\n\n"})
            return
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            await self._write(client, gone, send)
        finally:
            self._hub.leave(client)
            gone.cancel()

    async def _write(
        self,
        client: Client,
        gone: asyncio.Future[None],
        send: Callable[[_Message], Awaitable[None]],
    ) -> None:
        text: str | None = "retry: 1000\n\n"
        while text is not None and not gone.done():
            body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            try:
                await asyncio.wait_for(send(body), SEND_S)
            except TimeoutError:
                return  # it does not read: the connection is closed
            text = await _next(client, gone)
        if not gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next(client: Client, gone: asyncio.Future[None]) -> str | None:
    coming = asyncio.ensure_future(client.queue.get())
    either: set[asyncio.Future[Any]] = {coming, gone}
    await asyncio.wait(either, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
    if coming.done():
        return coming.result()
    coming.cancel()
    return None if gone.done() else ": alive\n\n"


async def _disconnected(receive: Callable[[], Awaitable[_Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
