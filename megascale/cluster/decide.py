"""`decide`: the state of a job and an event in, the next state and what to do out (MegaScale 4).

Pure: no clock, no I/O, no randomness. `now_s` is the job's clock. The same events give the same
decisions, which is how the journal rebuilds a job. `ladder.py` says what is done about a fault,
`recovery.py` how a stop becomes a start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megascale.cluster import recovery
from megascale.cluster.actions import Action, Notify
from megascale.cluster.decide_nodes import (
    allocated,
    check_done,
    evict_requested,
    hardware_seen,
    node_gone,
    node_heard,
    node_joined,
    node_silent,
)
from megascale.cluster.decide_ranks import (
    found,
    hang_suspected,
    rank_exited,
    ranks_started,
    step_reached,
)
from megascale.cluster.job import Fault, JobState
from megascale.cluster.launching import finish, launch, replenish_spares
from megascale.cluster.ledger import Ledger
from megascale.cluster.transitions import (
    Allocated,
    CheckDone,
    CommandDone,
    CommandFailed,
    DriverRestarted,
    Event,
    EvictRequested,
    Found,
    HangSuspected,
    HardwareSeen,
    NodeGone,
    NodeHeard,
    NodeJoined,
    NodeSilent,
    Policy,
    RankExited,
    RanksStarted,
    Readopted,
    StepReached,
    StopRequested,
    Tick,
    UpdateRequested,
)
from megascale.cluster.turn import Turn

LOOK_S = 30.0  # for dumps and their reading; then a suspicion counts as it is
ASK_AGAIN_S = 30.0  # a backend that had no machine


@dataclass(frozen=True)
class Decision:
    """`job` is the very same object where the event changed nothing."""

    job: JobState
    actions: tuple[Action, ...] = ()
    reason: str = ""


def begin(policy: Policy, now_s: float = 0.0) -> Decision:
    """A new job: its first machines are asked for."""
    start_ns = round(now_s * 1e9)
    turn = Turn(JobState(policy, ledger=Ledger(start_ns, start_ns), waiting_s=now_s), now_s)
    launch(turn)
    return Decision(turn.job, tuple(turn.actions), f"{policy.num_nodes} nodes asked for")


def decide(job: JobState, event: Event, now_s: float) -> Decision:
    """What `event` means for `job`. After the job's end nothing does."""
    if job.over:
        return Decision(job, (), "the job is over")
    turn = Turn(job, now_s)
    _HANDLERS[type(event)](turn, event)
    return Decision(turn.job, tuple(turn.actions), "; ".join(turn.reasons))


# ---------------------------------------------------------------- commands, people, clock


def _command_done(turn: Turn, event: CommandDone) -> None:
    if event.order == "stop" and event.epoch == turn.job.epoch:
        recovery.stopped(turn, event.node)


def _command_failed(turn: Turn, event: CommandFailed) -> None:
    job = turn.job
    if event.epoch != job.epoch or event.node not in job.nodes:
        return
    turn.say(f"{event.node} could not {event.order}: {event.reason}")
    if event.order == "stop" and job.phase == "stopping":
        recovery.condemn(turn, event.node, event.reason or "could not end its ranks")
    elif event.order == "start":
        ranks = tuple(job.ranks_of(job.nodes[event.node]))
        recovery.fail(turn, Fault("launch", (event.node,), ranks, text=event.reason))


def _stop_requested(turn: Turn, event: StopRequested) -> None:
    job = turn.job
    report = f"stopped as asked{': ' + event.reason if event.reason else ''}"
    if job.phase in ("starting", "training"):
        recovery.plan(turn, "stop", report, then="finish", ok=True, report=report)
    elif job.recovery is not None and job.phase in ("stopping", "diagnosing"):
        turn.recover(then="finish", ok=True, report=report)
        recovery.relaunch_if_checked(turn)
    else:
        finish(turn, ok=True, report=report)


def _update_requested(turn: Turn, event: UpdateRequested) -> None:
    turn.set(overrides=(*turn.job.overrides, *event.overrides))
    if turn.job.phase in ("starting", "training"):
        recovery.plan(turn, "update", event.reason or "an update was asked for")


def _tick(turn: Turn, _event: Tick) -> None:
    job, now_s = turn.job, turn.now_s
    for incident in job.open:
        if incident.quiet_after_s is not None and now_s >= incident.quiet_after_s:
            turn.close(incident.number, "did not happen again")
    late = [n for n in job.in_state("joining", "checking") if (n.until_s or now_s + 1) <= now_s]
    for node in late:
        recovery.evict(turn, node.name, f"did not answer while {node.state}", block=False)
        recovery.after_leaving(turn, node.name)
    job = turn.job
    if job.phase == "stopping" and now_s >= turn.recovery.deadline_s:
        for name in sorted(turn.recovery.waiting):
            recovery.condemn(turn, name, "did not end its ranks in time")
    if job.suspicion is not None and now_s - job.suspicion.since_s >= LOOK_S:
        nodes = job.nodes_of(job.suspicion.ranks)
        text = "its ranks made no progress, and no dump told more"
        recovery.fail(turn, Fault("hang", nodes, job.suspicion.ranks, job.suspicion.step, text))
    if job.starved_s is not None and now_s - job.starved_s >= ASK_AGAIN_S and not job.wanted:
        turn.set(starved_s=None)
        launch(turn)
        replenish_spares(turn)
    _give_up_waiting(turn)


def _give_up_waiting(turn: Turn) -> None:
    job = turn.job
    patience_s = job.policy.cluster.init_deadline_s
    if job.phase not in ("allocating", "checking") or job.waiting_s is None:
        return
    if turn.now_s - job.waiting_s >= patience_s:
        ready = len(job.in_state("spare", "active"))
        report = (
            f"{ready} of {job.policy.num_nodes} nodes were ready after {patience_s:g} s "
            "(cluster.init_deadline_s); free machines, or start with fewer --nodes"
        )
        finish(turn, ok=False, report=report, exit_code=5)


def _driver_restarted(turn: Turn, event: DriverRestarted) -> None:
    """The epoch rises, so that the driver before is refused; ranks train on. What is waited for
    is waited for anew: nobody could come while no driver was there."""
    job = turn.job
    turn.set(
        epoch=job.epoch + 1,
        policy=event.policy,
        wanted=0,
        starved_s=None,
        waiting_s=None if job.waiting_s is None else turn.now_s,
        num_drivers=job.num_drivers + 1,
        readopted=None,
    )
    for node in job.nodes.values():
        if node.until_s is not None:
            patience_s = event.policy.cluster.init_deadline_s
            turn.node(node.name, until_s=turn.now_s + patience_s)
    turn.say("the driver started again")
    if job.suspicion is not None:
        turn.close(job.suspicion.incident, "the driver started again")
        turn.set(suspicion=None)
    if job.phase == "starting":
        recovery.plan(turn, "driver_restart", "nobody knows which ranks were started")
    elif job.phase == "stopping":
        recovery.stop_again(turn)
    checking = tuple(node.name for node in turn.job.in_state("checking"))
    recovery.check(turn, checking)
    for node in turn.job.in_state("checking"):
        if job.policy.cluster.selfcheck != "off" and event.policy.cluster.selfcheck == "off":
            check_done(turn, CheckDone(node.name, ok=True))
    launch(turn)
    if turn.job.phase == "training":  # an answer may be lost with the driver that asked
        replenish_spares(turn)


def _readopted(turn: Turn, event: Readopted) -> None:
    turn.set(readopted=event)
    missing = f", {', '.join(event.missing[:8])} did not come" if event.missing else ""
    told = f"{len(event.agents)} agents were taken over within {event.seconds:.1f} s{missing}"
    turn.say(told)
    turn.act(Notify(told))


_HANDLERS: dict[type, Callable[[Turn, Any], None]] = {
    NodeJoined: node_joined,
    NodeHeard: node_heard,
    NodeSilent: node_silent,
    NodeGone: node_gone,
    Allocated: allocated,
    RankExited: rank_exited,
    HardwareSeen: hardware_seen,
    HangSuspected: hang_suspected,
    Found: found,
    CheckDone: check_done,
    CommandDone: _command_done,
    CommandFailed: _command_failed,
    RanksStarted: ranks_started,
    StepReached: step_reached,
    EvictRequested: evict_requested,
    StopRequested: _stop_requested,
    UpdateRequested: _update_requested,
    Tick: _tick,
    DriverRestarted: _driver_restarted,
    Readopted: _readopted,
}
