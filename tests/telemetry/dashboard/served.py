"""Dashboards over runs made for tests, and plain HTTP to ask them."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.telemetry.faults import Fault
from benchmarks.telemetry.synthetic import Job, write_lines
from megascale.telemetry.dashboard.server import Server
from megascale.telemetry.dashboard.source import find_source
from megascale.telemetry.dashboard.state import State
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Reader
from megascale.telemetry.store.run import open_run
from megascale.topology import Mesh
from tests.telemetry.dashboard.waiting import until

TOKEN = "a token of the tests, not a secret".replace(" ", "-")


def make_run(
    folder: Path, *faults: Fault, mesh: tuple[int, int, int] = (2, 4, 2), **of: Any
) -> Path:
    """A synthetic run of line files with `faults`, and a log of rank 0."""
    write_lines(folder, Job(mesh=Mesh(*mesh), faults=faults, **{"num_steps": 40, **of}))
    (folder / "logs").mkdir()
    (folder / "logs" / "rank00000.log").write_text("step: 1  loss: 6.2\nstep: 2  loss: 6.1\n")
    return folder


@contextmanager
def dashboard(
    given: Path | str,
    *,
    token: str | None = None,
    readers: Mapping[str, Reader] = READERS,
    token_file: Path | None = None,
    refresh_s: float = 0.2,
) -> Iterator[Server]:
    """A dashboard over `given`, ended at the end."""
    source = find_source(str(given), token_file)
    state = State(
        source, open_run, readers, may_write=token is not None, refresh_s=refresh_s, look_s=0.1
    )
    server = Server(state, token=token)
    server.start()
    try:
        yield server
    finally:
        server.close()


class Reply:
    """Status, headers by lower-case name, and the body, unpacked."""

    def __init__(self, reply: http.client.HTTPResponse) -> None:
        self.status = reply.status
        self.headers = {name.lower(): value for name, value in reply.getheaders()}
        raw = reply.read()
        packed = self.headers.get("content-encoding") == "gzip"
        self.body = gzip.decompress(raw) if packed else raw

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    server: Server,
    path: str,
    *,
    method: str = "GET",
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One request over a connection of its own."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, dict(headers or {}))
        return Reply(connection.getresponse())
    finally:
        connection.close()


def opened(server: Server) -> dict[str, Any]:
    """The overview once the run has been read."""

    def read() -> dict[str, Any] | None:
        seen: dict[str, Any] = ask(server, "/api/overview").json()
        return seen if seen["revision"] else None

    found: dict[str, Any] = until(read, "the run is opened")
    return found


class FakeDriver:
    """Speaks `/v1/status` and `/v1/evict` as a driver does; `status` may be changed."""

    def __init__(self, run_dir: Path, token: str = TOKEN) -> None:
        self.status: dict[str, Any] = {
            "phase": "training",
            "epoch": 2,
            "run_dir": str(run_dir),
            "job_s": 100.0,
            "newest_step": 40,
            "world_size": 16,
            "nodes": [
                {
                    "node": "n0",
                    "state": "active",
                    "host": "node-0000",
                    "switch": "s0",
                    "node_rank": 0,
                    "ranks": [0, 7],
                    "silence_s": 0.2,
                },
                {
                    "node": "n1",
                    "state": "suspect",
                    "host": "node-0001",
                    "switch": "s1",
                    "node_rank": 1,
                    "ranks": [8, 15],
                    "silence_s": 42.0,
                },
            ],
            "incidents": [
                {
                    "number": 3,
                    "cause": "hang",
                    "opened_s": 90.0,
                    "nodes": ["n1"],
                    "ranks": [9],
                    "step": 40,
                    "text": "rank 9 is silent",
                }
            ],
            "restarts": {"start": 1, "signal": 1},
            "ledger_s": {"useful": 80.0, "restart": 15.0, "detection": 5.0, "idle": 0.0},
            "ettr": 0.8,
        }
        self.evicted: list[dict[str, Any]] = []
        self.refuses: tuple[int, str] | None = None
        self._token = token
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeDriver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)  # may be called twice

    def beside(self, run_dir: Path) -> Path:
        """Its address and token in the run's folder, as a driver leaves them; the token's file."""
        folder = run_dir / "driver"
        folder.mkdir(exist_ok=True)
        (folder / "address.json").write_text(json.dumps({"url": self.url}))
        (folder / "token").write_text(self._token + "\n")
        return folder / "token"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        driver = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, driver.status)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if driver.refuses is not None:
                    self._answer(driver.refuses[0], {"detail": driver.refuses[1]})
                    return
                driver.evicted.append(body)
                self._answer(200, {"epoch": 2})

            def _answer(self, status: int, content: Any) -> None:
                if self.headers["Authorization"] != f"Bearer {driver._token}":
                    status, content = 401, {"detail": "this needs the driver's token"}
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
