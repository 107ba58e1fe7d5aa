"""Bodies as they go out: compact JSON, its tag, and its compressed form, each made once.

An answer is shared by all browsers that ask the same of the same state of the run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

_LEAST_COMPRESSED = 1024  # bytes; below, compression saves no packet
_LEVEL = 1  # 122,880 numbers: 12 ms against 60 at level 6, for a tenth more bytes


class RefusedError(Exception):
    """What was asked cannot be answered; `detail` says what was got and what is legal."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class Body:
    """Bytes of an answer."""

    def __init__(self, raw: bytes, media: str = "application/json") -> None:
        self.raw, self.media = raw, media

    @cached_property
    def tag(self) -> str:
        return f'"{hashlib.blake2b(self.raw, digest_size=12).hexdigest()}"'

    @cached_property
    def compressed(self) -> bytes | None:
        """None where it is too small to be worth it."""
        if len(self.raw) < _LEAST_COMPRESSED:
            return None
        return gzip.compress(self.raw, _LEVEL, mtime=0)


def json_body(value: Any) -> Body:
    """ValueError for what JSON has not, such as NaN: whoever made it has to say None."""
    return Body(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def negotiate(body: Body, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, bytes) of `body` for a request with `headers` (lower-case names)."""
    out = {"content-type": body.media, "etag": body.tag, "vary": "accept-encoding"}
    if body.tag in headers.get("if-none-match", ""):
        return 304, out, b""
    if "gzip" in headers.get("accept-encoding", "") and body.compressed is not None:
        return 200, out | {"content-encoding": "gzip"}, body.compressed
    return 200, out, body.raw
