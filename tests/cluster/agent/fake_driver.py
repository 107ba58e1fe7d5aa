"""A driver as small as it can be: it remembers what agents say and hands out what a test orders."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from megascale.cluster.messages import (
    Command,
    Heard,
    Heartbeat,
    Join,
    Joined,
    Order,
    RankReport,
    Result,
)

TOKEN = "of-the-tests"
POLL_S = 0.5


class FakeDriver:
    """On loopback; `stop` and `serve` it again on the same port to be absent for a while."""

    def __init__(self, *, epoch: int = 1, interval_s: float = 0.1, **joined: float) -> None:
        self.epoch = epoch
        self.joined = {
            "heartbeat_interval_s": interval_s,
            "orphan_timeout_s": 60.0,
            "grace_s": 1.0,
            "kill_deadline_s": 5.0,
            **joined,
        }
        self.joins: list[Join] = []
        self.beats: list[Heartbeat] = []
        self.results: list[Result] = []
        self.arrivals_s: list[float] = []
        self.known: set[str] = set()
        self.leave = False
        self.refuses: dict[str, int] = {}
        self._commands: list[Command] = []
        self._first = 0
        self._changed = threading.Condition()
        self._server: _Server | None = None
        self.port = 0
        self.serve()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self) -> None:
        driver = self

        class Handler(_Handler):
            fake = driver

        self._server = _Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        for connection in self._server.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its thread would serve on

    # ------------------------------------------------------------ of tests

    def order(self, order: Order, *, epoch: int | None = None, sequence: int | None = None) -> int:
        """Send it; its sequence number."""
        with self._changed:
            number = 1 + max((c.sequence for c in self._commands), default=0)
            number = number if sequence is None else sequence
            at = self.epoch if epoch is None else epoch
            self._commands.append(Command(epoch=at, sequence=number, order=order))
            self._changed.notify_all()
        return number

    def forget(self) -> None:
        """No command is given to whoever asks next; numbers go on."""
        with self._changed:
            self._first = len(self._commands)

    def result_of(self, sequence: int, timeout_s: float = 30.0) -> Result:
        return self.wait(
            lambda: next((r for r in self.results if r.sequence == sequence), None),
            timeout_s,
            f"a result of command {sequence}",
        )

    def rank(self, rank: int, timeout_s: float = 30.0, **wanted: Any) -> RankReport:
        """The newest report of `rank`, once it has these values."""

        def look() -> RankReport | None:
            reports = [r for r in self.beats[-1].ranks if r.rank == rank] if self.beats else []
            fits = reports and all(getattr(reports[0], k) == v for k, v in wanted.items())
            return reports[0] if fits else None

        return self.wait(look, timeout_s, f"rank {rank} with {wanted}")

    def wait(self, look: Callable[[], Any], timeout_s: float, what: str) -> Any:
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = look()
                if found:
                    return found
                left_s = give_up - time.monotonic()
                if left_s <= 0:
                    last = self.beats[-1] if self.beats else None
                    raise AssertionError(f"no {what} in {timeout_s} s; the last beat was {last}")
                self._changed.wait(left_s)

    # ------------------------------------------------------------ of agents

    def answer(self, path: str, query: dict[str, str], body: bytes) -> Any:
        with self._changed:
            self._changed.notify_all()
            if path == "/v1/join":
                join = Join.model_validate_json(body)
                self.joins.append(join)
                self.known.add(join.incarnation)
                return Joined(epoch=self.epoch, node_rank=0, **self.joined).model_dump()
            if path == "/v1/heartbeat":
                beat = Heartbeat.model_validate_json(body)
                self.beats.append(beat)
                self.arrivals_s.append(time.monotonic())
                known = beat.incarnation in self.known
                return Heard(epoch=self.epoch, known=known, leave=self.leave).model_dump()
            if path == "/v1/results":
                self.results.append(Result.model_validate_json(body))
                return Heard(epoch=self.epoch).model_dump()
            assert path == "/v1/commands", path
            after = int(query["after"])
            give_up = time.monotonic() + POLL_S
            while True:
                found = [
                    c.model_dump() for c in self._commands[self._first :] if c.sequence > after
                ]
                if found or time.monotonic() >= give_up:
                    return found
                self._changed.wait(give_up - time.monotonic())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: list[Any] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Agents are killed in these tests; a broken connection is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: ClassVar[FakeDriver]

    def do_GET(self) -> None:
        self._reply(b"")

    def do_POST(self) -> None:
        self._reply(self.rfile.read(int(self.headers["Content-Length"])))

    def _reply(self, body: bytes) -> None:
        asked = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(asked.query).items()}
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            status, content = 401, b"{}"
        elif asked.path in self.fake.refuses:
            status, content = self.fake.refuses[asked.path], b"{}"
        else:
            status, content = 200, json.dumps(self.fake.answer(asked.path, query, body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name there
        """Silent."""
