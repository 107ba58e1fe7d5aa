"""What the driver prints: plain lines about what happened and what is done about it.

The journal has every event and action as they are; here they become a few sentences, the first sign
of a fault and its cause, not each sign. `first_rank.py` adds what rank 0 says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from megascale.cluster.actions import (
    Action,
    Alert,
    Closed,
    EvictNode,
    Notify,
    Opened,
    Replenish,
    SelfCheck,
    StartEpoch,
    StopEpoch,
)
from megascale.cluster.decide import Decision
from megascale.cluster.job import Fault, JobState
from megascale.cluster.transitions import CheckDone, CommandFailed, Event, NodeJoined, RanksStarted

LONGEST = 500  # characters of a line
MOST_A_SECOND = 20  # of the lines that a node each may cause
_log = logging.getLogger(__name__)

# By kind of a fault: what happened to `who`.
_HAPPENED = {
    "signal": "{who} was killed by {signal}",
    "exit": "{who} ended with exit code {code}",
    "exception": "{who} failed",
    "config": "{who} refused to start",
    "launch": "{who} could not be started",
    "network": "{who} lost a peer",
    "out_of_memory": "{who} ran out of memory",
    "disk_full": "{who} found the disk full",
    "nonfinite": "{who} met a number that is not finite",
    "numerical": "{who} met a number that is not finite",
    "loss_spike": "the loss jumped",
    "replicas_differ": "parameters of replicas differ",
    "hang": "{who} made no progress",
    "straggler": "{who} is slower than its peers",
    "node_lost": "{who} is lost",
    "node_gone": "{who} is gone",
    "agent_died": "{who} has a new agent",
    "ranks_missing": "ranks are gone",
    "silent": "{who} is silent",
    "selfcheck": "{who} failed its self-check",
    "unkillable": "{who} has a process that does not end",
}
_OF_NODES = ("node_lost", "node_gone", "agent_died", "silent", "selfcheck", "unkillable")


def happened(fault: Fault) -> str:
    """`rank 3 on node1 was killed by signal 9 (SIGKILL) at step 42`."""
    who = _who(() if fault.kind in _OF_NODES else fault.ranks, fault.nodes)
    form = _HAPPENED.get(fault.kind, f"{fault.kind.replace('_', ' ')} at {{who}}")
    text = form.format(who=who, signal=_signal(fault), code=fault.code)
    at = "" if fault.step is None else f" at step {fault.step}"
    told = _more(fault)
    return f"{text}{at}{f': {told}' if told else ''}"


def _more(fault: Fault) -> str:
    """What the fault's text says beyond how the process ended (`agent/failures.py`)."""
    text = fault.text.strip()
    for known in (f"ended by {fault.signal}", f"exited {fault.code}", f"{fault.signal}"):
        text = text.removeprefix(known)
    return text.removeprefix(" without a word").removeprefix(", ").strip()


def _who(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    some = "rank" if len(ranks) == 1 else "ranks"
    of = f"{some} {_listed([str(rank) for rank in ranks])}" if ranks else ""
    on = _listed(list(nodes))
    return f"{of} on {on}" if of and on else of or on or "the job"


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _signal(fault: Fault) -> str:
    number = f"signal {-fault.code}" if fault.code is not None and fault.code < 0 else ""
    if number and fault.signal and fault.signal != number:
        return f"{number} ({fault.signal})"
    return number or fault.signal or "a signal"


def _short(line: str) -> str:
    """An error may be as long as its rank likes; the journal has all of it."""
    left = len(line) - LONGEST
    return line if left <= 0 else f"{line[:LONGEST]}... and {left} characters, in the journal"


class Dated(logging.Formatter):
    """The date on a line of its own before the first line of a day."""

    _day = ""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        day = time.strftime("%Y-%m-%d", time.localtime(record.created))
        before, self._day = self._day, day
        return line if day == before else f"{day}\n{line}"


class Words:
    """One a driver. `say` after what was decided is on the disk."""

    def __init__(self) -> None:
        self._told: Fault | None = None  # the fault that was told last
        self._num_faults = 0
        self._second, self._said, self._left_out = 0, 0, 0

    def say(self, event: Event | None, decision: Decision) -> None:
        for is_usual, line in self.lines(event, decision):
            if not is_usual or self._may(1):
                (_log.info if is_usual else _log.warning)("%s", _short(line))

    def lines(self, event: Event | None, decision: Decision) -> Iterator[tuple[bool, str]]:
        """(usual, line). The usual may be left out where there are very many."""
        job, actions = decision.job, decision.actions
        yield from self._event(event, decision)
        news = [*self._stop(job, actions), *self._cause(job)]
        yield from ((False, line) for line in news)
        told = " ".join(news)
        opened = [action.incident.text for action in actions if isinstance(action, Opened)]
        known = [text for text in opened if text and text in told]
        for action in actions:
            if isinstance(action, Alert) and any(text in action.text for text in known):
                continue  # it says so with other words
            line = _action(action, job, told)
            if line:
                yield isinstance(action, StartEpoch | Replenish | Notify | Closed), line

    def _event(self, event: Event | None, decision: Decision) -> Iterator[tuple[bool, str]]:
        match event:
            case NodeJoined(node=node):
                is_checked = any(isinstance(action, SelfCheck) for action in decision.actions)
                if is_checked:
                    yield True, f"{node} joined and checks itself"
                elif decision.reason:
                    yield True, decision.reason.partition(";")[0]
            case CheckDone(node=node, ok=True):
                yield True, f"{node} passed its self-check"
            case RanksStarted():
                yield True, f"all {decision.job.world_size} ranks are in their first step"
            case CommandFailed():
                yield False, decision.reason

    def _stop(self, job: JobState, actions: Sequence[Action]) -> Iterator[str]:
        """Why all ranks stop; or what was opened although they go on."""
        stop = next((action for action in actions if isinstance(action, StopEpoch)), None)
        recovery = job.recovery
        opened = [action.incident for action in actions if isinstance(action, Opened)]
        fault = recovery.faults[-1] if stop and recovery and recovery.faults else None
        if fault is not None:
            self._told = fault
            yield f"{happened(fault)}; all ranks stop"
        elif stop is not None and recovery is not None and recovery.planned:
            why = [action.text for action in actions if isinstance(action, Notify)]
            yield "; ".join([*why, f"all ranks {'save and ' if stop.save else ''}stop"])
        if fault is None or job.phase in ("starting", "training"):
            for one in opened:
                sign = Fault(one.cause, one.nodes, one.ranks, one.step, one.text)
                yield happened(sign)

    def _cause(self, job: JobState) -> Iterator[str]:
        """Once all stopped: what the cause was, where that is not what was told."""
        newest = job.faults[-1] if job.faults else None
        if newest is not None and len(job.faults) != self._num_faults and newest != self._told:
            yield f"the cause: {happened(newest)}"
            self._told = newest
        self._num_faults = len(job.faults)

    def _may(self, count: int) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            if self._left_out:
                _log.info("%d lines like these were left out", self._left_out)
            self._second, self._said, self._left_out = second, 0, 0
        self._said += count
        if self._said <= MOST_A_SECOND:
            return True
        self._left_out += count
        return False


def _action(action: Action, job: JobState, told: str) -> str:
    """A line of its own for what is done, or ""."""
    match action:
        case StartEpoch(epoch=epoch, places=places):
            num_ranks = len(places) * job.policy.procs_per_node
            nodes = _listed([place.node for place in places])
            again = "restarting" if job.num_restarts else "starting"
            return f"{again} {num_ranks} ranks on {nodes} (epoch {epoch})"
        case Replenish(count=count, first=first):
            return f"asking for {count} machine{'s' * (count > 1)}{'' if first else ' more'}"
        case EvictNode(node=node, reason=reason, block=block):
            why = "" if reason in told else f": {reason}"
            return f"{node} leaves the job{', its host is blocked' * block}{why}"
        case Alert(text=text) | Notify(text=text):
            return "" if text in told else text
        case Closed(incident=incident, outcome=outcome):
            return f"over: {incident.cause.replace('_', ' ')} ({outcome})"
        case _:
            return ""
