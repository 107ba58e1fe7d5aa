"""Who may ask, and what every answer carries."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from megascale.telemetry.dashboard.guard import MOST_QUERY_BYTES, Guard

TOKEN = "0123456789abcdef"
PRESENTED = f"Bearer {TOKEN}"


async def _inner(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"let in"})


def _ask(
    headers: dict[str, str],
    *,
    method: str = "GET",
    query: bytes = b"",
    token: str | None = TOKEN,
) -> tuple[int, dict[bytes, bytes]]:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    pairs = [(k.encode(), v.encode()) for k, v in {"host": "127.0.0.1:8000", **headers}.items()]
    scope = {"type": "http", "method": method, "path": "/", "query_string": query, "headers": pairs}
    asyncio.run(Guard(_inner, {"localhost", "Node7"}, token)(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize(
    "host", ["127.0.0.1:80", "localhost:9", "node7", "NODE7:1", "[::1]:80", "10.1.2.3", "[fe80::1]"]
)
def test_an_address_or_a_name_of_this_machine_is_let_in(host: str) -> None:
    assert _ask({"host": host})[0] == 200


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:8000", "localhost.evil:1"])
def test_another_name_is_not(host: str) -> None:
    assert _ask({"host": host})[0] == 421


@pytest.mark.parametrize(("site", "status"), [("same-origin", 200), ("none", 200),
                                              ("cross-site", 403), ("same-site", 403)])  # fmt: skip
def test_another_site_may_not_ask(site: str, status: int) -> None:
    assert _ask({"sec-fetch-site": site})[0] == status


def test_a_query_that_is_too_long_is_refused() -> None:
    assert _ask({}, query=b"x" * MOST_QUERY_BYTES)[0] == 200
    assert _ask({}, query=b"x" * (MOST_QUERY_BYTES + 1))[0] == 414


@pytest.mark.parametrize(
    ("headers", "token", "status"),
    [
        ({"authorization": PRESENTED, "content-length": "2"}, TOKEN, 200),
        ({"authorization": PRESENTED + "x", "content-length": "2"}, TOKEN, 401),
        ({"content-length": "2"}, TOKEN, 401),
        ({"authorization": PRESENTED}, TOKEN, 413),
        ({"authorization": PRESENTED, "content-length": "many"}, TOKEN, 413),
        ({"authorization": PRESENTED, "content-length": "999999"}, TOKEN, 413),
        ({"authorization": PRESENTED, "content-length": "2"}, None, 403),
        ({"authorization": "Bearer None", "content-length": "2"}, None, 403),
    ],
)
def test_only_the_token_may_write(headers: dict[str, str], token: str | None, status: int) -> None:
    assert _ask(headers, method="POST", token=token)[0] == status


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
def test_every_answer_forbids_scripts_and_frames(host: str) -> None:
    headers = _ask({"host": host})[1]
    policy = headers[b"content-security-policy"].decode()
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers[b"x-content-type-options"] == b"nosniff"
