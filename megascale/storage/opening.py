"""From what a user wrote, a path or a URL, to a storage."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megascale.errors import ConfigError
from megascale.storage.interface import Storage
from megascale.storage.local import LocalFolder
from megascale.storage.waiting import DEFAULT_STALL_S

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


def is_url(place: str | Path) -> bool:
    return isinstance(place, str) and _URL.match(place) is not None


def open_storage(place: str | Path, *, stall_s: float = DEFAULT_STALL_S) -> Storage:
    """A folder's path, `file://`, or a URL of any protocol that fsspec knows: `s3://BUCKET/PREFIX`,
    `hdfs://HOST:PORT/PATH`, `memory://NAME` (this process alone).

    Nothing is asked of a server here. Raises ConfigError for a protocol that nobody knows,
    MissingExtraError for one whose library is not installed.
    """
    if not is_url(place):
        if not str(place):
            raise ConfigError("a storage without a name: give a folder or a URL (s3://...)")
        return LocalFolder(Path(place), stall_s=stall_s)
    url = str(place)
    if urlsplit(url).scheme.lower() in ("file", "local"):
        return LocalFolder(Path(unquote(urlsplit(url).path)), stall_s=stall_s)
    from megascale.storage.remote import open_remote

    return open_remote(url, stall_s=stall_s)
