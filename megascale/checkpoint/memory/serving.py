"""A keeper hands out what its slot files hold, over several connections: its end and the other.

    connect; token (32 bytes)          ->   "MSSLOT\\x00\\x02"
    file, start, number of bytes       ->   those bytes, as often as asked

The token is drawn for one restart and told over the control group of the run, so nobody else is
served. The server is there while a restart needs it. Bytes go from the file to the socket in the
kernel (sendfile): the interpreter of the keeper, which may be filling its own state, is not asked.
"""

from __future__ import annotations

import fcntl
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path

from torch import Tensor

from megascale.errors import CheckpointError

_GREETING = b"MSSLOT\x00\x02"
_TOKEN_BYTES = 32
_REQUEST = struct.Struct("<BQQ")
_CONNECT_S, _STALL_S = 2.0, 30.0
_LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Address:
    """Where a keeper serves: of its `hosts` some may not be reached from everywhere."""

    hosts: tuple[str, ...]
    port: int
    token: bytes = field(repr=False)


class Server:
    """Serves `files` to whoever knows the token, until it is closed.

    loopback_only  all who may ask are on this machine
    """

    def __init__(self, files: Sequence[Path], *, loopback_only: bool) -> None:
        self._files = tuple(files)
        self._socket = socket.create_server(("127.0.0.1" if loopback_only else "", 0), backlog=256)
        hosts = (_LOOPBACK,) if loopback_only else (*ipv4_addresses(), _LOOPBACK)
        port = self._socket.getsockname()[1]
        self.address = Address(hosts, port, secrets.token_bytes(_TOKEN_BYTES))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, name="slot-server", daemon=True).start()

    def close(self) -> None:
        for end in (self._socket, *self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._socket.accept()
            except OSError:
                return  # closed
            self._open.append(end)
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        end.settimeout(_STALL_S)
        with end, suppress(OSError):  # the other end says what it misses
            if not compare_digest(_exactly(end, _TOKEN_BYTES), self.address.token):
                return
            end.sendall(_GREETING)
            while request := _exactly(end, _REQUEST.size):
                file, start, num_bytes = _REQUEST.unpack(request)
                with self._files[file].open("rb") as source:
                    end.sendfile(source, start, num_bytes)


class Connection:
    """The other end: bytes of `file` of the keeper at `host`. Raises CheckpointError."""

    def __init__(self, host: str, address: Address, file: int, keeper: int) -> None:
        self._file, self._keeper = file, keeper
        try:
            self._socket = socket.create_connection((host, address.port), timeout=_CONNECT_S)
            with ExitStack() as undo:
                undo.callback(self._socket.close)
                self._socket.sendall(address.token)
                if _exactly(self._socket, len(_GREETING)) != _GREETING:
                    raise OSError("it does not answer as a keeper does")
                undo.pop_all()
        except OSError as error:
            raise CheckpointError(f"rank {keeper} cannot be reached at {host} ({error})") from error
        # Blocking, with the kernel's own deadline: a call a chunk, without the interpreter's lock.
        self._socket.settimeout(None)
        deadline = struct.pack("ll", int(_STALL_S), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)

    def ask(self, start: int, num_bytes: int) -> None:
        try:
            self._socket.sendall(_REQUEST.pack(self._file, start, num_bytes))
        except OSError as error:
            raise self._gone(error.strerror) from error

    def take(self, into: Tensor) -> None:
        """What was asked for first and was not taken yet, all of it."""
        data, got = into.numpy().data, 0
        try:
            while got < len(data):
                num = self._socket.recv_into(data[got:], 0, socket.MSG_WAITALL)
                if num == 0:
                    raise self._gone("the connection was closed")
                got += num
        except OSError as error:
            raise self._gone(f"nothing came for {_STALL_S:.0f} s, or {error.strerror}") from error

    def close(self) -> None:
        self._socket.close()

    def _gone(self, why: str | None) -> CheckpointError:
        return CheckpointError(f"rank {self._keeper} was lost while it sent: {why}")


def reachable(address: Address, file: int, keeper: int, *, same_host: bool) -> list[str]:
    """The hosts of `address` that answer; [] where none does."""
    hosts = [host for host in address.hosts if same_host or host != _LOOPBACK]

    def answers(host: str) -> bool:
        try:
            Connection(host, address, file, keeper).close()
        except CheckpointError:
            return False
        return True

    if not hosts:
        return []
    with ThreadPoolExecutor(len(hosts)) as pool:
        return [host for host, did in zip(hosts, pool.map(answers, hosts), strict=True) if did]


def ipv4_addresses() -> list[str]:
    """Of the interfaces of this machine that are up and have one, without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return [host for host in found if not host.startswith("127.")]


def _exactly(end: socket.socket, num_bytes: int) -> bytes:
    """That many bytes; b"" where the other end closed before."""
    data = b""
    while len(data) < num_bytes:
        part = end.recv(num_bytes - len(data))
        if not part:
            return b""
        data += part
    return data
