"""Injectors for RDMA ports in a replayed sysfs: a link that is down for some seconds, and traffic
that stops at one node while the others' goes on."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from megascale.cluster.chaos.inject import Hit, Target
from megascale.cluster.chaos.live import LiveJob

FEED_S = 0.3
FIRST_BYTES, BYTES_A_S = 1_000_000, 1_000_000
JOIN_S = 5.0


def link_blip(job: LiveJob, target: Target) -> Hit:
    """The port goes down, and up again after `seconds`."""
    node = job.node_of(target.node or 0)
    host = job.rig.host(job.host(node))
    hit = Hit(time.monotonic(), node=node)
    host.write_port("ports/1/state", "1: DOWN")
    time.sleep(float(target.options["seconds"]))
    host.write_port("ports/1/state", "4: ACTIVE")
    return hit


def traffic_stops(job: LiveJob, target: Target) -> Hit:
    """All ports move bytes, for `seconds`; then all but the node's."""
    node = job.node_of(target.node or 0)
    feed = _Feed(job)
    job.undo.append(feed.end)
    feed.start()
    time.sleep(float(target.options["seconds"]))
    hit = Hit(time.monotonic(), node=node)
    feed.without(job.host(node))
    return hit


class _Feed(threading.Thread):
    """Bytes in every host's port, until `end`."""

    def __init__(self, job: LiveJob) -> None:
        super().__init__(name="traffic", daemon=True)
        self._job, self._ended = job, threading.Event()
        self._silent = ""
        self._began_s = time.monotonic()

    def without(self, host: str) -> None:
        self._silent = host

    def end(self) -> None:
        self._ended.set()
        self.join(JOIN_S)

    def run(self) -> None:
        while not self._ended.wait(FEED_S):
            moved = FIRST_BYTES + int(BYTES_A_S * (time.monotonic() - self._began_s))
            with suppress(OSError):  # of a host that is being made
                self._write(str(moved))

    def _write(self, moved: str) -> None:
        hosts = self._job.rig.folder / "hosts"
        for host in [folder.name for folder in hosts.iterdir()] if hosts.is_dir() else []:
            if host != self._silent:
                for name in ("port_rcv_data", "port_xmit_data"):
                    self._job.rig.host(host).write_port(f"ports/1/counters/{name}", moved)
