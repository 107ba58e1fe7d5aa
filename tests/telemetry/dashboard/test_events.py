"""Server-sent events: who is sent what, and who is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from megascale.telemetry.dashboard import events
from megascale.telemetry.dashboard.events import MOST_WAITING, EventStream, Hub


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_new_client_is_sent_the_newest_of_each_kind_first() -> None:
    async def check() -> list[str | None]:
        hub = Hub()
        for step in (1, 2):
            hub.publish("state", {"step": step})
        hub.publish("driver", {"phase": "running"})
        client = hub.subscribe()
        assert client is not None
        hub.publish("state", {"step": 3})
        await _settle()
        return [client.queue.get_nowait() for _ in range(client.queue.qsize())]

    assert asyncio.run(check()) == [
        'event: state\ndata: {"step":2}\n\n',
        'event: driver\ndata: {"phase":"running"}\n\n',
        'event: state\ndata: {"step":3}\n\n',
    ]


def test_one_that_does_not_read_is_dropped_and_the_others_are_not() -> None:
    async def check() -> None:
        hub = Hub()
        slow, quick = hub.subscribe(), hub.subscribe()
        assert slow is not None
        assert quick is not None
        for step in range(MOST_WAITING + 1):
            hub.publish("state", {"step": step})
            await _settle()
            assert quick.queue.get_nowait() is not None
        assert hub.num_dropped == 1
        assert hub.num_clients == 1
        assert slow.queue.get_nowait() is None  # its end, and nothing old before it

    asyncio.run(check())


def test_closing_ends_every_stream_and_refuses_new_ones() -> None:
    async def check() -> None:
        hub = Hub()
        client = hub.subscribe()
        assert client is not None
        hub.close()
        await _settle()
        assert client.queue.get_nowait() is None
        assert hub.subscribe() is None

    asyncio.run(check())


def test_a_client_whose_connection_does_not_drain_is_left(monkeypatch: Any) -> None:
    monkeypatch.setattr(events, "SEND_S", 0.05)

    async def check() -> int:
        hub = Hub()
        never = asyncio.Event()

        async def receive() -> MutableMapping[str, Any]:
            await never.wait()
            raise AssertionError

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await never.wait()

        await asyncio.wait_for(EventStream(hub)({}, receive, send), 2.0)
        return hub.num_clients

    assert asyncio.run(check()) == 0


def test_a_stream_ends_when_its_client_goes() -> None:
    async def check() -> list[bytes]:
        hub, gone = Hub(), asyncio.Event()
        sent: list[bytes] = []

        async def receive() -> MutableMapping[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message.get("body", b""))
            if b"step" in sent[-1]:
                gone.set()

        hub.publish("state", {"step": 7})
        await asyncio.wait_for(EventStream(hub)({}, receive, send), 2.0)
        assert hub.num_clients == 0
        return sent

    assert asyncio.run(check())[1:] == [b"retry: 1000\n\n", b'event: state\ndata: {"step":7}\n\n']
