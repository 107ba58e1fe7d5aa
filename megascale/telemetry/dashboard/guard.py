"""In front of every route: whom it is for, how much may be sent, and what every answer carries.

The page is for the people who can reach this address, and nobody's web site may use their browser
to read it: the Host header must name this machine (a name that was re-bound to it does not), no
other site may frame it or start its requests, and nothing that it shows can run a script. What
changes anything needs the token, which is compared in constant time.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_QUERY_BYTES = 32 << 10  # 512 ranks as a list are 3 KB; uvicorn's parser ends at 64 KiB
MOST_BODY_BYTES = 64 << 10
_READING = ("GET", "HEAD")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ALWAYS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class Guard:
    """ASGI. `names`: what this machine is called beside its addresses; `token` None: read-only."""

    def __init__(self, inner: App, names: set[str], token: str | None) -> None:
        self._inner, self._names = inner, {name.lower() for name in names}
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _complete(list(message.get("headers", ())))
            await send(message)

        headers = dict(scope["headers"])
        refused = self._refused(scope, headers)
        if refused is None:
            await self._inner(scope, receive, with_headers)
            return
        status, detail = refused
        body = json.dumps({"detail": detail}).encode()
        said = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        said += [(b"www-authenticate", b"Bearer")] * (status == 401)
        await with_headers({"type": "http.response.start", "status": status, "headers": said})
        await send({"type": "http.response.body", "body": body})

    def _refused(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """(status, why) of what is not let in."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_here(host):
            return 421, f"the Host header is {host[:100]!r}; use an address of this machine"
        if len(scope.get("query_string", b"")) > MOST_QUERY_BYTES:
            return 414, f"the query is longer than {MOST_QUERY_BYTES} bytes; ask for fewer ranks"
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return 403, "another site started this request; open the page itself"
        if scope["method"] in _READING:
            return None
        return self._may_not_write(headers)

    def _may_not_write(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if self._expected is None:
            return 403, "this dashboard is read-only; start it with --token-file FILE"
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return 401, "this needs the header Authorization: Bearer TOKEN, with the file's token"
        try:
            num_bytes = int(headers.get(b"content-length", b"-1"))
        except ValueError:
            num_bytes = -1
        if not 0 <= num_bytes <= MOST_BODY_BYTES:
            return 413, f"send a body of at most {MOST_BODY_BYTES} bytes, with its Content-Length"
        return None

    def _is_here(self, host: str) -> bool:
        """An address of whatever kind, or a name of this machine; the port does not matter."""
        bare, bracket, _ = host.rpartition("]")
        name = (bare[1:] if bracket else host.rpartition(":")[0] or host).lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


def _complete(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """With what every answer carries; what is not a file of the page must be asked again."""
    there = {name.lower() for name, _ in headers}
    added = [(name, value) for name, value in _ALWAYS if name not in there]
    if b"cache-control" not in there:
        added.append((b"cache-control", b"no-cache"))
    return headers + added
