"""Serves the dashboard: uvicorn around `app.py`, on the loopback address unless told otherwise.

Whoever reaches the address may look; so a cluster's dashboard belongs behind an SSH tunnel, or
behind whatever proxy decides there who may see what.
"""

from __future__ import annotations

import socket
import threading
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

from megascale.env import driver_token_file, hostname
from megascale.errors import DataError, LaunchError, require_extra
from megascale.telemetry.dashboard.app import make_app
from megascale.telemetry.dashboard.guard import Guard
from megascale.telemetry.dashboard.source import find_source, is_address
from megascale.telemetry.dashboard.state import State

try:
    import uvicorn
except ImportError:
    raise require_extra("uvicorn", "telemetry") from None

START_S = 10.0
STOP_S = 5.0


class Server:
    """Between `start` and `close` it answers at `url`, and `state` is current."""

    def __init__(
        self, state: State, *, token: str | None = None, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.state = state
        self._socket = _listen(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        names = {"localhost", hostname(), hostname().partition(".")[0], host}
        config = uvicorn.Config(
            Guard(make_app(state), names, token),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )

    @property
    def url(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}/"

    def start(self) -> None:
        """Raises LaunchError where it does not answer in time."""
        self.state.start()
        self._thread.start()
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            if time.monotonic() > deadline_s or not self._thread.is_alive():
                self.close()
                raise LaunchError(f"the dashboard at {self.url} did not start")
            time.sleep(0.005)

    def close(self) -> None:
        self.state.close()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._socket.close()

    def wait(self) -> None:
        """Until the server ends, or the person ends it."""
        while self._thread.is_alive():
            self._thread.join(0.5)


def serve(
    given: str,
    *,
    host: str,
    port: int,
    token_file: Path | None,
    open_browser: bool,
    say: Callable[[str], None],
) -> None:
    """`megascale dashboard`: until Ctrl-C. Raises as `find_source`, and LaunchError for an address
    that cannot be listened on."""
    from megascale.telemetry.readers import READERS
    from megascale.telemetry.store.run import open_run

    if token_file is None and is_address(given):
        token_file = driver_token_file()
    token = None if token_file is None else read_token(token_file)
    source = find_source(given, token_file)
    state = State(source, open_run, READERS, may_write=token is not None)
    server = Server(state, token=token, host=host, port=port)
    server.start()
    try:
        say(f"run folder  {source.run_dir.absolute()}")
        say(f"dashboard   {server.url}  (Ctrl-C ends it)")
        if open_browser:
            webbrowser.open(server.url)
        server.wait()
    except KeyboardInterrupt:
        say("ended")
    finally:
        server.close()


def read_token(path: Path) -> str:
    """The token that lets people act. DataError: it cannot be read, or is no token."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the token file {path} cannot be read ({error})") from None
    if len(token) < 16 or len(token.split()) != 1:
        raise DataError(
            f"{path} holds {len(token)} characters; a token is one word of at least 16, such as "
            "of: openssl rand -hex 32"
        )
    return token


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise LaunchError(
            f"the dashboard cannot listen on {host} port {port} ({error.strerror or error}); "
            "choose another with --host and --port, or leave --port out"
        ) from None
    return listening
