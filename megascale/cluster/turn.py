"""One call of `decide`: the state as it changes, and what was said and ordered on the way.

It lives inside the call only, so that the handlers read as sentences while `decide` stays a pure
function of its arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from megascale.cluster.actions import Action, Closed, Opened
from megascale.cluster.incidents import Ends, Incident
from megascale.cluster.job import JobState, Node, Recovery
from megascale.cluster.ledger import TimeKind

_T = TypeVar("_T")

QUIET_S = 300.0  # two alerts in it are one fault


class Turn:
    def __init__(self, job: JobState, now_s: float) -> None:
        self.job, self.now_s = job, now_s
        self.actions: list[Action] = []
        self.reasons: list[str] = []

    def act(self, action: Action) -> None:
        self.actions.append(action)

    def say(self, reason: str) -> None:
        self.reasons.append(reason)

    def set(self, **changes: Any) -> None:
        self.job = replace(self.job, **changes)

    def put(self, node: Node) -> None:
        self.set(nodes={**self.job.nodes, node.name: node})

    def node(self, name: str, **changes: Any) -> Node:
        """Change a node that is there; the changed one."""
        changed = replace(self.job.nodes[name], **changes)
        self.put(changed)
        return changed

    @property
    def recovery(self) -> Recovery:
        assert self.job.recovery is not None, self.job.phase
        return self.job.recovery

    def recover(self, **changes: Any) -> None:
        self.set(recovery=replace(self.recovery, **changes))

    def book(self, kind: TimeKind) -> None:
        self.set(ledger=self.job.ledger.book(self.now_s, kind))

    # ------------------------------------------------------------ incidents

    def open(
        self,
        cause: str,
        text: str,
        *,
        nodes: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        step: int | None = None,
        ends: Ends = "step",
    ) -> int:
        """The number of the open incident of `cause`, which may be one from before.

        What was an alert and is acted on now ends as the act does.
        """
        quiet_after_s = self.now_s + QUIET_S if ends == "quiet" else None
        known = self.job.incident(cause)
        if known is not None:
            is_alert = known.ends == "quiet"
            acted_on = is_alert and ends != "quiet"
            self._exchange(
                replace(
                    known,
                    nodes=_joined(known.nodes, nodes),
                    ranks=_joined(known.ranks, ranks),
                    epoch=self.job.epoch if acted_on else known.epoch,
                    ends=ends if acted_on else known.ends,
                    quiet_after_s=quiet_after_s if is_alert else known.quiet_after_s,
                )
            )
            return known.number
        incident = Incident(
            number=self.job.num_incidents + 1,
            cause=cause,
            opened_s=self.now_s,
            epoch=self.job.epoch,
            nodes=nodes,
            ranks=ranks,
            step=step,
            text=text,
            ends=ends,
            quiet_after_s=quiet_after_s,
        )
        self.set(open=(*self.job.open, incident), num_incidents=incident.number)
        self.act(Opened(incident))
        return incident.number

    def close(self, number: int, outcome: str) -> None:
        """The one closing event of an open incident; nothing where it is closed already."""
        for incident in self.job.open:
            if incident.number == number:
                self.set(open=tuple(one for one in self.job.open if one is not incident))
                self.act(Closed(incident, outcome))

    def rename(self, number: int, cause: str, text: str) -> None:
        """A better name for an incident. An older one of that name ends: it happened again."""
        older = self.job.incident(cause)
        if older is not None and older.number != number:
            self.close(older.number, f"happened again: incident {number}")
        for incident in self.job.open:
            if incident.number == number and incident.cause != cause:
                self._exchange(replace(incident, cause=cause, text=text))

    def forget_node(self, cause: str, node: str, outcome: str) -> None:
        """Take a node out of the open incident of `cause`; with the last one it ends."""
        incident = self.job.incident(cause)
        if incident is None or node not in incident.nodes:
            return
        left = tuple(name for name in incident.nodes if name != node)
        if left:
            self._exchange(replace(incident, nodes=left))
        else:
            self.close(incident.number, outcome)

    def _exchange(self, incident: Incident) -> None:
        self.set(
            open=tuple(incident if one.number == incident.number else one for one in self.job.open)
        )


def _joined(first: tuple[_T, ...], second: tuple[_T, ...]) -> tuple[_T, ...]:
    return first + tuple(item for item in second if item not in first)
