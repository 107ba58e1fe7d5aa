"""A fault's line in the table: what the journal says was noticed, decided and done, and whether
that is what `faults.py` demands. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megascale.cluster.chaos.faults import Kind
from megascale.cluster.chaos.inject import Hit
from megascale.cluster.chaos.observe import Turn
from megascale.cluster.incidents import Incident
from megascale.cluster.job import Fault

EPSILON_S = 0.02
_UNDER_WAY = ("starting", "training")


@dataclass
class Line:
    """Seconds are since the injection; None: it did not happen.

    noticed_s  an incident was opened      decided_s  the ranks were stopped, or a node sent away
    named_s    whom and why was said       checked_s  the last self-check before the restart
    started_s  the next epoch              first_s    its first step; new_s: the first new step
    flaps      nodes that were thought silent and were not, beside what the fault is about
    closing    how the incident was closed, the one time
    wrong      why this is no success; empty: it is one
    """

    number: int
    kind: str
    target: str
    injected_s: float
    step: int | None = None
    noticed_s: float | None = None
    decided_s: float | None = None
    named_s: float | None = None
    checked_s: float | None = None
    started_s: float | None = None
    first_s: float | None = None
    new_s: float | None = None
    suspect_s: float | None = None
    readopted_s: float | None = None
    lost_steps: int | None = None
    restarts: int = 0
    cause: str = ""
    named: str = ""
    right: bool | None = None
    closing: str = ""
    flaps: int = 0
    wrong: str = ""
    skipped: str = ""
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def handled(self) -> bool:
        return not self.wrong and not self.skipped

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "handled": self.handled}


@dataclass(frozen=True)
class Story:
    """Turns from a fault to the next one, what is to be found in them, and how it ended `later`."""

    kind: Kind
    hit: Hit
    turns: Sequence[Turn]
    later: Sequence[Turn] = ()

    @classmethod
    def since(
        cls, kind: Kind, hit: Hit, turns: Sequence[Turn], until_s: float = float("inf")
    ) -> Story:
        own = [t for t in turns if hit.at_s - EPSILON_S <= t.at_s < until_s - EPSILON_S]
        return cls(kind, hit, own, [t for t in turns if t.at_s >= until_s - EPSILON_S])

    # ------------------------------------------------------------ moments

    def decided(self) -> Turn | None:
        """The turn that stopped the ranks, or sent away a node that trains nothing."""
        for turn in self.turns:
            stops = turn.before.phase in _UNDER_WAY and turn.job.phase not in _UNDER_WAY
            if stops and turn.event != "StopRequested":
                return turn
            if self.kind.outcome == "evict" and turn.did("EvictNode"):
                return turn
        return None

    def started(self) -> Turn | None:
        """The last start of an epoch, where there was one."""
        return next((turn for turn in reversed(self.turns) if turn.did("StartEpoch")), None)

    def new_step(self) -> Turn | None:
        """The first step, of a later epoch, that nobody had done before."""
        decided = self.decided()
        if decided is None:
            return None
        newest = decided.before.newest_step
        for turn in self.turns:
            later = turn.job.epoch > decided.before.epoch
            if turn.event == "StepReached" and later and turn.body["step"] > newest:
                return turn
        return None

    # ------------------------------------------------------------ what was said

    def opened(self) -> dict[int, Turn]:
        return {a["incident"]["number"]: t for t in self.turns for a in t.did("Opened")}

    def closed(self) -> dict[int, list[tuple[Turn, dict[str, Any]]]]:
        found: dict[int, list[tuple[Turn, dict[str, Any]]]] = {}
        for turn in (*self.turns, *self.later):
            for action in turn.did("Closed"):
                found.setdefault(action["incident"]["number"], []).append((turn, action))
        return found

    def judged(self) -> list[tuple[Turn, Fault]]:
        """Faults that a recovery was judged by."""
        return [
            (turn, turn.job.faults[-1])
            for turn in self.turns
            if turn.job.faults != turn.before.faults and turn.job.faults
        ]

    def incidents(self) -> dict[int, Incident]:
        """Those opened since, as they were last."""
        found: dict[int, Incident] = {}
        opened = self.opened()
        for turn in self.turns:
            for incident in (*turn.before.open, *turn.job.open):
                if incident.number in opened:
                    found[incident.number] = incident
        return found

    def flaps(self) -> set[int]:
        """Numbers of incidents that say only that a busy machine was slow to be heard."""
        closed = self.closed()
        return {
            number
            for number, incident in self.incidents().items()
            if incident.cause == "silent"
            and "silent" not in self.kind.causes
            and any("flap" in action["outcome"] for _, action in closed.get(number, ()))
        }

    def is_over(self, now_s: float) -> bool:
        """What had to come has come, so that the next fault may."""
        if not self.turns:
            return False
        last = self.turns[-1].job
        if last.over:
            return True
        outcome, waited_s = self.kind.outcome, now_s - self.hit.at_s
        incidents = self.incidents()
        is_open = any(i.number in incidents and i.ends != "quiet" for i in last.open)
        if outcome == "restart":
            return self.new_step() is not None and not is_open and last.phase == "training"
        if outcome == "flap":
            return bool(incidents) and not is_open
        if outcome == "evict":
            full = len(last.in_state("spare")) >= last.policy.spares
            return self.decided() is not None and full
        if outcome == "readopt":
            return waited_s >= self.kind.watch_s
        if outcome == "alert":
            return bool(incidents) and waited_s >= self.kind.watch_s
        return outcome == "unmoved" and waited_s >= self.kind.watch_s


def tell(line: Line, story: Story) -> Line:
    """Fill the line in. To be called when the job is over, because then every incident is."""
    hit = story.hit
    decided, started, new = story.decided(), story.started(), story.new_step()

    def after(turn: Turn | None) -> float | None:
        return None if turn is None else round(turn.at_s - hit.at_s, 3)

    opened = story.opened()
    line.noticed_s = after(next(iter(opened.values()), None))
    line.decided_s, line.started_s, line.new_s = after(decided), after(started), after(new)
    if new is not None and line.lost_steps is None:
        line.lost_steps = 0  # it went on, and nothing was done twice
    line.readopted_s = hit.said.get("readopted_s")
    line.suspect_s = after(_first(story, "silent"))
    line.restarts = sum(len(turn.did("StartEpoch")) for turn in story.turns)
    if started is not None:
        steps = [t for t in story.turns if t.event == "StepReached" and t.at_s > started.at_s]
        line.first_s = after(steps[0] if steps else None)
    checks = [t for t in story.turns if t.event == "CheckDone"]
    if decided is not None and started is not None:
        line.checked_s = after(
            max(
                (t for t in checks if decided.at_s <= t.at_s <= started.at_s),
                key=lambda t: t.at_s,
                default=None,
            )
        )
    _name(line, story, after)
    line.said = hit.said
    line.flaps = len(story.flaps())
    line.wrong = "; ".join(_complaints(line, story))
    return line


def _name(line: Line, story: Story, after: Any) -> None:
    judged, hit = story.judged(), story.hit
    incidents = {n: i for n, i in story.incidents().items() if n not in story.flaps()}
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    if judged:
        turn, fault = judged[0]
        line.cause, ranks, nodes = fault.kind, fault.ranks, fault.nodes
        line.named_s = after(_first_sign(story, fault) or turn)
    elif incidents:
        wanted = [one for one in incidents.values() if one.cause in story.kind.causes]
        incident = (wanted or list(incidents.values()))[0]
        line.cause, ranks, nodes = incident.cause, incident.ranks, incident.nodes
        line.named_s = line.noticed_s
    elif (decided := story.decided()) is not None and (sent := decided.did("EvictNode")):
        line.cause, nodes = "node_gone", (sent[0]["node"],)
        line.named_s = line.decided_s
    told = [f"rank {', '.join(map(str, ranks))}" if ranks else "", ", ".join(nodes)]
    line.named = " on ".join(part for part in told if part)
    if story.kind.names == "rank":
        line.right = set(ranks) == {hit.rank}
    elif story.kind.names == "node":
        line.right = set(nodes) == {hit.node}
    closed = story.closed()
    ends = [
        action["outcome"]
        for number, incident in incidents.items()
        for _, action in closed.get(number, ())
        if incident.cause == line.cause
    ]
    line.closing = ends[-1] if ends else ""


def _complaints(line: Line, story: Story) -> list[str]:
    """Everything in which it was not as it had to be."""
    kind, found = story.kind, []
    if kind.causes and line.cause not in kind.causes:
        found.append(f"cause {line.cause or 'none'}, must be {' or '.join(kind.causes)}")
    if not kind.causes and line.cause:
        found.append(f"an incident was opened: {line.cause} {line.named}")
    if line.right is False:
        want = f"rank {story.hit.rank}" if kind.names == "rank" else f"node {story.hit.node}"
        found.append(f"{line.named or 'nobody'} named, must be {want}")
    closed = story.closed()
    for number, incident in story.incidents().items():
        times = len(closed.get(number, ()))
        if times != 1:
            found.append(f"incident {number} ({incident.cause}) was closed {times} times")
    if kind.outcome == "restart" and line.new_s is None:
        found.append("no new step was done")
    if kind.outcome in ("evict", "flap", "alert", "readopt", "unmoved") and line.restarts:
        found.append(f"{line.restarts} restarts, must be none")
    if kind.outcome == "readopt" and line.readopted_s is None:
        found.append("not every node was readopted")
    if kind.outcome == "evict" and line.decided_s is None:
        found.append("no node was exchanged")
    last = story.turns[-1].job if story.turns else None
    if kind.outcome == "stop" and (last is None or last.phase != "failed" or not last.report):
        found.append("the job did not end with a report")
    if kind.outcome != "stop" and last is not None and last.phase == "failed":
        found.append(f"the job failed: {last.report}")
    return found


def _first_sign(story: Story, fault: Fault) -> Turn | None:
    """The turn in which the fault that was judged in the end was said first."""
    for turn in story.turns:
        if turn.job.recovery is not None and fault in turn.job.recovery.faults:
            return turn
    return None


def _first(story: Story, cause: str) -> Turn | None:
    for turn in story.turns:
        if any(action["incident"]["cause"] == cause for action in turn.did("Opened")):
            return turn
    return None
