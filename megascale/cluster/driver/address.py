"""Whether a driver could listen at an address, asked before it makes anything."""

from __future__ import annotations

import socket

from megascale.errors import LaunchError


def check_address(host: str, port: int) -> None:
    """port 0: any that is free. Raises LaunchError with why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
            tried.listen()
        except OSError as error:
            raise LaunchError(
                f"the driver cannot listen on {host} port {port} ({error.strerror or error}); "
                "choose an address of this machine with --host, or another --port"
            ) from None
