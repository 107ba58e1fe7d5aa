"""The driver of a run, asked over its HTTP API (`/v1/status`, `/v1/evict`) with its token.

Plain HTTP of the standard library, no proxy of the environment; telemetry knows nothing of the
control plane but this. Each call has a deadline.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megascale.errors import LaunchError

CALL_S = 3.0
MOST_BYTES = 8 << 20  # of an answer; 1,536 nodes are 300 KB


class RefusedByDriverError(LaunchError):
    """It heard, and said no."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"the driver says: {detail}")
        self.status = status


class Driver:
    """For any number of threads: every call has a connection of its own."""

    def __init__(self, url: str, token_file: Path) -> None:
        self.url, self._token_file = url.rstrip("/"), token_file

    def status(self) -> dict[str, Any]:
        """LaunchError: no answer, or no right to one."""
        return self._call("GET", "/v1/status", None)

    def evict(self, node: str, reason: str, *, block: bool) -> dict[str, Any]:
        """Takes `node` out of the job. Raises as `status`; RefusedByDriverError: it will not."""
        return self._call("POST", "/v1/evict", {"node": node, "reason": reason, "block": block})

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        headers = {"Authorization": f"Bearer {self._token()}", "Content-Type": "application/json"}
        try:
            connection = kind(parts.hostname or "", parts.port, timeout=CALL_S)
            try:
                connection.request(
                    method, path, None if body is None else json.dumps(body), headers
                )
                reply = connection.getresponse()
                text, status = reply.read(MOST_BYTES), reply.status
            finally:
                connection.close()
            content = json.loads(text)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise LaunchError(
                f"the driver at {self.url} does not answer ({type(error).__name__}: {error}); is "
                "the job over, or the address another one?"
            ) from None
        if status != 200:
            detail = content.get("detail") if isinstance(content, dict) else None
            raise RefusedByDriverError(status, str(detail or f"HTTP {status}")[:500])
        if not isinstance(content, dict):
            raise LaunchError(f"{self.url}{path} answers {text[:80]!r}; that is no driver")
        return content

    def _token(self) -> str:
        try:
            return self._token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(
                f"the driver's token {self._token_file} cannot be read ({error}); run the "
                "dashboard as the user who started the job, or copy the token"
            ) from None
