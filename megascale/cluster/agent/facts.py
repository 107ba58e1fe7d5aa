"""What the node is, said once when it joins."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megascale.cluster.messages import NodeFacts
from megascale.env import installed_versions

if TYPE_CHECKING:
    from megascale.cluster.agent.agent import Settings

_PACKAGES = ("megascale", "torch", "triton", "numpy", "nvidia-ml-py")


def node_facts(settings: Settings, devices: list[str]) -> NodeFacts:
    return NodeFacts(
        host=settings.host,
        ip=settings.ip,
        switch=settings.switch,
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        devices=devices,
        versions=installed_versions(_PACKAGES),
    )


def address_towards(driver_url: str) -> str:
    """This node's address on the way to the driver; nothing is sent. Loopback where unknown."""
    there = urlsplit(driver_url)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            there.hostname, there.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
