"""A network of its own for each logical host of the local backend, so that one can be cut.

    bridge ms213-5 (10.213.5.1, where the driver listens)
      |- ms213-5v0 == eth0 (10.213.5.2) in namespace ms213-5-0
      |- ms213-5v1 == eth0 (10.213.5.3) in namespace ms213-5-1

The subnet names them all, so two jobs of one machine need two subnets, and a restarted driver finds
what the one before made. Nothing leaves the machine: no address is routed. Needs root and `ip`.
"""

from __future__ import annotations

import ipaddress
import os
import random
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from megascale.cluster.backends.base import BackendError

_COMMAND_S = 10.0


def gateway(subnet: str) -> str:
    """The address in `subnet` on which a driver must listen: the first."""
    return str(_network(subnet)[1])


def free_subnet() -> str:
    """A subnet 10.213.x.0/24 that no bridge of ours has."""
    choice = list(range(256))
    random.SystemRandom().shuffle(choice)
    for third in choice:
        if not Path(f"/sys/class/net/ms213-{third}").exists():
            return f"10.213.{third}.0/24"
    raise BackendError(
        "all subnets 10.213.x.0/24 are in use; remove bridges with: ip link del ms213-x"
    )


def check_root() -> None:
    """Raises BackendError for a user who can make no namespaces."""
    if os.geteuid() != 0:
        raise BackendError(
            f"namespaces = true needs root, this is user {os.geteuid()}; run as root, or "
            "without namespaces (partitions cannot be tried then)"
        )


class Namespaces:
    """The namespaces of one subnet. LaunchErrors come before anything is made."""

    def __init__(self, subnet: str, driver_url: str) -> None:
        self._addresses = _network(subnet)
        _, second, third, _ = str(self._addresses[0]).split(".")
        self._tag = f"ms{second}-{third}"
        check_root()
        host = urlsplit(driver_url).hostname or ""
        if host == "localhost" or host.startswith("127."):
            raise BackendError(
                f"agents in namespaces do not reach {driver_url}; let the driver listen on 0.0.0.0 "
                f"or {gateway(subnet)} and give http://{gateway(subnet)}:PORT"
            )

    def open(self) -> None:
        """Make the bridge, if it is not there. A driver may listen on its address from then on."""
        if not Path(f"/sys/class/net/{self._tag}").exists():
            _ip("link", "add", self._tag, "type", "bridge")
            _ip("address", "add", f"{self._addresses[1]}/24", "dev", self._tag)
        _ip("link", "set", self._tag, "up")

    def join(self, index: int) -> list[str]:
        """Make host `index`'s namespace; what to put before a command to run it in there."""
        space, link = f"{self._tag}-{index}", f"{self._tag}v{index}"
        _ip("netns", "add", space)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", link, "master", self._tag, "up")
        _ip("-n", space, "address", "add", f"{self._addresses[index + 2]}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "link", "set", "eth0", "up")
        return ["ip", "netns", "exec", space]

    def leave(self, index: int) -> None:
        """Remove host `index`'s namespace and link, whatever of them is there."""
        if Path(f"/sys/class/net/{self._tag}v{index}").exists():
            _ip("link", "del", f"{self._tag}v{index}")
        if Path(f"/run/netns/{self._tag}-{index}").exists():
            _ip("netns", "del", f"{self._tag}-{index}")

    def cut(self, index: int, down: bool) -> None:
        _ip("link", "set", f"{self._tag}v{index}", "down" if down else "up")

    def close(self) -> None:
        """Remove all of this subnet."""
        spaces = Path("/run/netns").glob(f"{self._tag}-*")
        for index in sorted(int(path.name.rpartition("-")[2]) for path in spaces):
            self.leave(index)
        if Path(f"/sys/class/net/{self._tag}").exists():
            _ip("link", "del", self._tag)


def _network(subnet: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise BackendError(f"subnet {subnet!r}: {error}; give one such as 10.213.5.0/24") from None
    if network.prefixlen != 24 or not network.is_private:
        raise BackendError(f"subnet {subnet}: it must be private and /24, such as 10.213.5.0/24")
    return network


def _ip(*arguments: str) -> None:
    command = ["ip", *arguments]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(
            f"{' '.join(command)}: {error}; namespaces need the package iproute2"
        ) from None
    if done.returncode:
        hint = "; another job has this subnet, or one ended without close: give another"
        raise BackendError(
            f"{' '.join(command)}: {done.stderr.strip()}"
            + (hint if "exists" in done.stderr else "")
        )
