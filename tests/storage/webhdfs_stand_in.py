"""A STAND-IN for an HDFS name node: the few calls of WebHDFS that fsspec makes, over a folder.

Written from the documented REST interface (two-step CREATE, APPEND and OPEN with a redirect, JSON
RemoteException). It shows that our side speaks that interface, nothing about Hadoop itself.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_PREFIX = "/webhdfs/v1"


@contextmanager
def webhdfs_stand_in(folder: Path) -> Iterator[str]:
    """The URL of its root."""
    handler = type("Handler", (_Handler,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"webhdfs://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self) -> None:
        path, query = self._asked()
        if not path.exists():
            self._missing(path)
        elif query["op"] == "GETFILESTATUS":
            self._json({"FileStatus": _status(path, "")})
        elif query["op"] == "LISTSTATUS":
            entries = [_status(p, p.name) for p in path.iterdir()] if path.is_dir() else None
            listed = [_status(path, "")] if entries is None else entries
            self._json({"FileStatuses": {"FileStatus": listed}})
        elif query["op"] == "OPEN":
            if "data" not in query:
                self._redirect()
                return
            start = int(query.get("offset", 0))
            data = path.read_bytes()[start:]
            self._reply(200, data[: int(query.get("length", len(data)))])

    def do_PUT(self) -> None:
        path, query = self._asked()
        if query["op"] == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
            self._json({"boolean": True})
        elif query["op"] == "RENAME":
            target = self.folder / query["destination"].lstrip("/")
            renamed = path.exists() and not target.exists()
            if renamed:
                path.rename(target)
            self._json({"boolean": renamed})
        elif "data" not in query:
            self._redirect()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._body())
            self._reply(201, b"")

    def do_POST(self) -> None:
        path, query = self._asked()
        if "data" not in query:
            self._redirect()
            return
        with path.open("ab") as file:
            file.write(self._body())
        self._reply(200, b"")

    def do_DELETE(self) -> None:
        path, query = self._asked()
        found = path.exists()
        if path.is_dir() and query.get("recursive") == "true":
            shutil.rmtree(path)
        elif found:
            path.unlink()
        self._json({"boolean": found})

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  the base's name
        """No line a request."""

    def _asked(self) -> tuple[Path, dict[str, str]]:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        return self.folder / unquote(url.path.removeprefix(_PREFIX)).lstrip("/"), query

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _redirect(self) -> None:
        self._body()
        self._reply(307, b"", {"Location": f"http://{self.headers['Host']}{self.path}&data=true"})

    def _missing(self, path: Path) -> None:
        exception = {"exception": "FileNotFoundException", "message": f"no {path.name}"}
        self._reply(404, json.dumps({"RemoteException": exception}).encode())

    def _json(self, content: dict[str, Any]) -> None:
        self._reply(200, json.dumps(content).encode())

    def _reply(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _status(path: Path, suffix: str) -> dict[str, Any]:
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    status = path.stat()
    return {
        "pathSuffix": suffix,
        "type": kind,
        "length": status.st_size,
        "modificationTime": int(status.st_mtime * 1000),
    }
