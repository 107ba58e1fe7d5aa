"""Injectors for RDMA ports in a replayed sysfs: a link that is down for some seconds, and traffic
that stops at one node while the others' goes on."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from megascale.cluster.chaos.inject import Hit, Target
from megascale.cluster.chaos.live import LiveJob
from megascale.errors import LaunchError

FEED_S = 0.3
STEP_BYTES = 1_000_000
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
    """All ports move bytes with each step, for `seconds`; then all but the node's."""
    node = job.node_of(target.node or 0)
    feed = _Feed(job)
    job.undo.append(feed.end)
    feed.start()
    time.sleep(float(target.options["seconds"]))
    hit = Hit(time.monotonic(), node=node)
    feed.without(job.host(node))
    return hit


class _Feed(threading.Thread):
    """Counts the bytes of the job's steps in every host's port, until `end`."""

    def __init__(self, job: LiveJob) -> None:
        super().__init__(name="traffic", daemon=True)
        self._job, self._ended = job, threading.Event()
        self._silent = ""
        self._moved = STEP_BYTES

    def without(self, host: str) -> None:
        self._silent = host

    def end(self) -> None:
        self._ended.set()
        self.join(JOIN_S)

    def run(self) -> None:
        while not self._ended.wait(FEED_S):
            with suppress(LaunchError, OSError):  # between two epochs
                steps = [now.step for now in self._job.ranks().values() if now.step is not None]
                self._moved = max(self._moved, (1 + max(steps, default=0)) * STEP_BYTES)
                self._write()

    def _write(self) -> None:
        hosts = self._job.rig.folder / "hosts"
        for host in [folder.name for folder in hosts.iterdir()] if hosts.is_dir() else []:
            if host != self._silent:
                for name in ("port_rcv_data", "port_xmit_data"):
                    self._job.rig.host(host).write_port(
                        f"ports/1/counters/{name}", str(self._moved)
                    )
