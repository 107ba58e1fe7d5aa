"""Who the ranks are and what each was last seen in, for the logical topology (MegaScale 5.2)."""

from __future__ import annotations

from typing import Any

from megascale.telemetry.dashboard.answers import Body, json_body
from megascale.telemetry.dashboard.feeds.incidents import errors
from megascale.telemetry.store.run import Run
from megascale.topology import AXES

MOST_PEERS = 4  # longer lists are groups of the mesh, which the page knows


def places(run: Run) -> Body:
    """The mesh, each rank's host, its ongoing record at a deadline, and its last error."""
    of, hosts = run.places, sorted(set(run.places.host_R))
    number = {host: at for at, host in enumerate(hosts)}
    mesh = {axis: getattr(run.mesh, axis) for axis in AXES}
    return json_body(
        {
            "mesh": mesh,
            "world_size": run.mesh.world_size,
            "rank": of.rank_R.tolist(),
            "hosts": hosts,
            "host": [number[host] for host in of.host_R],
            "ongoing": _ongoing(run),
            "errors": errors(run),
        }
    )


def _ongoing(run: Run) -> dict[str, list[Any]]:
    records = run.ongoing()
    plain = ("rank", "name", "step", "phase", "op", "group", "seq", "error")
    found: dict[str, list[Any]] = {
        field: [getattr(one, field) for one in records] for field in plain
    }
    found["unix_s"] = [one.t_ns / 1e9 for one in records]
    found["waited_s"] = [round(one.waited_ns / 1e9, 3) for one in records]
    found["peers"] = [
        list(one.peers) if 0 < len(one.peers) <= MOST_PEERS else None for one in records
    ]
    return found
