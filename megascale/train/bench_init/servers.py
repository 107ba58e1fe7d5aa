"""The servers that are measured, each a process of its own on a port of this machine.

torch's TCPStore, with one thread that polls ("tcp": `use_libuv=False`, the only one when the paper
was written) or on libuv ("tcp-libuv", its default since torch 2.4), and a redis-server ("redis"),
which keeps nothing on disk.

torch's server asks for the name of everybody who connects, in its only thread: a name server that
drops one request in fifty, as one did here, stalls it 5 s each time (50 s at 512 ranks). That is no
part of what is measured, so names are asked for by TCP, where a refusal comes at once.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megascale.env import child_environment, free_port
from megascale.errors import ConfigError, LaunchError

STORES = ("tcp", "tcp-libuv", "redis")
_START_S = 60.0
SPARE_FILES = 64  # of a server, beside its connections
NO_STALLS = {"RES_OPTIONS": "use-vc timeout:1 attempts:1"}
_TCP_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv={libuv})
print(store.port, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Server:
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Processor time so far, of the whole process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def check_redis_server() -> str:
    """Where redis-server is. ConfigError where it is not."""
    found = shutil.which("redis-server")
    if found is None:
        raise ConfigError(
            "redis-server is not installed, and the bench measures one; install it (Debian: "
            "apt-get install redis-server), or leave redis out of --stores"
        )
    return found


@contextmanager
def serving(store: str, num_clients: int) -> Iterator[Server]:
    """A server of this kind for so many connections, ended at the end of the context."""
    start = _start_redis if store == "redis" else _start_tcp
    with tempfile.TemporaryDirectory() as folder:
        process, port = start(store, num_clients, folder)
        try:
            yield Server(port, process.pid)
        finally:
            process.kill()
            process.communicate()


def _start_redis(_store: str, num_clients: int, folder: str) -> tuple[subprocess.Popen[str], int]:
    port = free_port()
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "maxclients": num_clients + SPARE_FILES,
        "tcp-backlog": 4096,
        "appendonly": "no",
        "save": "",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [check_redis_server(), *words],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(16) == b"+PONG\r\n":
                    return process, port
        except OSError:
            time.sleep(0.02)
    process.kill()
    told = process.communicate()[0]
    raise LaunchError(f"redis-server did not answer on port {port}; it said:\n{told[-500:]}")


def _start_tcp(store: str, _num_clients: int, folder: str) -> tuple[subprocess.Popen[str], int]:
    program = _TCP_SERVER.format(libuv=store == "tcp-libuv")
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env=child_environment(NO_STALLS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()  # ends where the process does
    if not line.strip().isdecimal():
        process.kill()
        process.communicate()
        raise LaunchError(f"torch's TCPStore ({store}) did not start; it said {line!r}")
    return process, int(line)
