"""The driver's HTTP server: uvicorn in a thread, around `api.py`.

It listens where it is told, by default on the loopback address only, and answers nobody without the
token, which lies in a file that its owner alone can read.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megascale.cluster.driver.api import make_app
from megascale.cluster.driver.desk import Desk
from megascale.cluster.driver.gate import Gate
from megascale.errors import LaunchError, require_extra

try:
    import uvicorn
except ImportError:
    raise require_extra("uvicorn", "cluster") from None

START_S = 10.0
BACKLOG = 4096  # a whole cluster connects in the second after a restart


def make_token(path: Path) -> str:
    """The token in `path`: the one that is there, so that agents of the driver before know it."""
    if path.exists():
        if path.stat().st_mode & 0o077:
            raise LaunchError(f"{path} may be read by others; chmod 600 it, or remove it")
        token = path.read_text().strip()
        if token:
            return token
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


class Server:
    """Between `start` and `close` it answers. `url` is for agents."""

    def __init__(
        self,
        desk: Desk,
        token: str,
        *,
        run_dir: str,
        job_clock: Callable[[], float],
        check_update: Callable[[list[str]], None] = lambda _overrides: None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._desk = desk
        self.app = make_app(desk, run_dir=run_dir, job_clock=job_clock, check_update=check_update)
        self._socket = _listen(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            Gate(self.app, desk, token),
            loop="auto",  # uvloop: 139 us of CPU a heartbeat, asyncio 191, both with httptools
            http="auto",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
            backlog=BACKLOG,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Raises LaunchError where it does not answer in time."""
        self._thread.start()
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            if time.monotonic() > deadline_s or not self._thread.is_alive():
                raise LaunchError(f"the HTTP server at {self.url} did not start")
            time.sleep(0.01)

    def close(self) -> None:
        self._desk.close()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise LaunchError(
            f"the driver cannot listen on {host} port {port} ({error.strerror}); choose another "
            "with --host and --port, or leave --port out"
        ) from None
    return listening
