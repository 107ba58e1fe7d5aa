"""Which agents of the driver before have come to this one, and how long that took. Pure."""

from __future__ import annotations

from megascale.cluster.job import OVER, JobState
from megascale.cluster.transitions import Event, NodeJoined, Readopted

PATIENCE_S = 30.0  # then those that did not come are named


class Readoption:
    """job: as the driver before left it. began_s: when this driver began, monotonic."""

    def __init__(self, job: JobState, began_s: float) -> None:
        self._began_s = began_s
        self._agents: list[str] = []
        living = [node for node in job.nodes.values() if node.state not in OVER]
        self._waiting = {node.name: node.incarnation for node in living if node.incarnation}
        self._is_told = not self._waiting

    def see(self, event: Event, job: JobState, now_s: float) -> Readopted | None:
        """After `event` led to `job`: the one word about it, once all have come or time is up."""
        if self._is_told:
            return None
        if isinstance(event, NodeJoined) and self._waiting.get(event.node) == event.incarnation:
            del self._waiting[event.node]
            self._agents.append(event.node)
        coming = [name for name in self._waiting if job.nodes[name].state not in OVER]
        seconds = now_s - self._began_s
        if job.over or (coming and seconds < PATIENCE_S):
            return None
        self._is_told = True
        return Readopted(tuple(sorted(self._agents)), tuple(sorted(self._waiting)), seconds)
