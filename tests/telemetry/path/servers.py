"""A redis-server of a test's own: started, killed and started again on one port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

from megascale.env import free_port

BINARY = shutil.which("redis-server")
START_S = 10.0


class RedisServer:
    """A context; empty at each start, unless `appends`: then it remembers what it had on disk."""

    def __init__(self, folder: Path, *, appends: bool = False) -> None:
        self._folder, self._appends = folder, appends
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/run"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        assert BINARY is not None
        append = ["--appendonly", "yes" if self._appends else "no", "--appendfsync", "everysec"]
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *append]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([BINARY, *options], cwd=self._folder, stdout=log)
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                time.sleep(0.02)
        raise AssertionError(f"redis-server on port {self.port} did not answer in {START_S:.0f} s")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
