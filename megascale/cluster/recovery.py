"""Stop, diagnose, start again: the way from a fault, or a plan, to the next epoch.

    fail / plan -> stopping -> (all ranks gone) settle -> diagnosing -> (checks done) relaunch
                -> starting, or allocating where machines are missing, or the end

Every wait has a deadline. A node that does not say in time that its ranks are gone is evicted and
its host blocked: it may hold a process that nobody can kill.
"""

from __future__ import annotations

from dataclasses import replace

from megascale.cluster import ladder, placement
from megascale.cluster.actions import EvictNode, Notify, SelfCheck, StopEpoch
from megascale.cluster.job import KEPT_FAULTS, OVER, Fault, Node, NodeState, Planned, Recovery
from megascale.cluster.launching import finish, launch, replenish_spares
from megascale.cluster.ledger import TimeKind
from megascale.cluster.turn import Turn

ANSWER_S = 5.0  # a command's way there and its result's way back
CHECK_S = 60.0  # a light self-check; a full one takes up to ten times as long
_UNCOUNTED = ("", "update", "stop", "grow", "evict", "driver_restart")


def fail(turn: Turn, fault: Fault) -> None:
    """A fault of ranks or nodes that take part. While all stop already, one sign more."""
    job = turn.job
    if job.phase in ("starting", "training"):
        found: TimeKind = "diagnosis" if job.suspicion else "detection"
        turn.book(found if job.phase == "training" else "restart")
        number = turn.open(
            fault.kind, fault.text, nodes=fault.nodes, ranks=fault.ranks, step=fault.step
        )
        if job.suspicion is not None and job.suspicion.incident != number:
            turn.close(job.suspicion.incident, f"explained by incident {number}")
        turn.set(suspicion=None)
        _stop(turn, Recovery(incident=number, faults=(fault,)))
    elif job.phase == "stopping" and not turn.recovery.settled:
        recovery = turn.recovery
        number = recovery.incident or turn.open(
            fault.kind, fault.text, nodes=fault.nodes, ranks=fault.ranks, step=fault.step
        )
        turn.recover(faults=_kept((*recovery.faults, fault)), incident=number)
        if recovery.save:  # a save needs every rank: it cannot succeed any more
            _stop(turn, replace(turn.recovery, save=False))


def _kept(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """When a whole cluster fails at once: the one that explains the others, and the newest."""
    if len(faults) <= KEPT_FAULTS:
        return faults
    first = ladder.primary(faults)
    return (first, *[one for one in faults if one is not first][1 - KEPT_FAULTS :])


def plan(turn: Turn, planned: Planned, reason: str, **changes: object) -> None:
    """Stop on purpose, at a saved state where there can be one."""
    job = turn.job
    turn.say(reason)
    turn.act(Notify(f"{planned}: {reason}"))
    save = job.policy.can_save and job.phase == "training" and not job.suspicion
    if job.phase == "training" and job.epoch_step is not None:
        turn.book("useful" if job.epoch_step >= job.newest_step else "replay")
    else:
        turn.book("restart")
    _stop(turn, replace(Recovery(planned=planned, save=save), **changes))  # type: ignore[arg-type]


def _stop(turn: Turn, recovery: Recovery) -> None:
    job, cluster = turn.job, turn.job.policy.cluster
    waiting = [name for _, name in sorted(job.holders.items())]
    deadline_s = turn.now_s + cluster.grace_s + cluster.kill_deadline_s + ANSWER_S
    if recovery.save:
        deadline_s += cluster.save_deadline_s
    turn.set(
        phase="stopping",
        recovery=replace(recovery, waiting=frozenset(waiting), deadline_s=deadline_s),
    )
    turn.act(StopEpoch(job.epoch, tuple(waiting), recovery.save))
    settle_if_stopped(turn)


def stopped(turn: Turn, node: str) -> None:
    """The ranks of `node` are gone, or the node is."""
    if turn.job.phase == "stopping" and not turn.recovery.settled:
        turn.recover(waiting=turn.recovery.waiting - {node})
        settle_if_stopped(turn)


def settle_if_stopped(turn: Turn) -> None:
    recovery = turn.recovery
    if recovery.waiting or recovery.settled:
        return
    turn.book("checkpoint" if recovery.save else "restart")
    if recovery.faults:
        turn.set(
            faults=(*turn.job.faults, ladder.primary(recovery.faults))[-KEPT_FAULTS:],
        )
    verdict = ladder.judge(turn.job, recovery)
    turn.say(verdict.reason)
    if recovery.incident is not None:
        turn.rename(recovery.incident, verdict.cause, verdict.reason)
    turn.set(ranks_epoch=None, exited=frozenset(), epoch_step=None)
    turn.recover(
        settled=True,
        cause=verdict.cause,
        evict=(*recovery.evict, *verdict.evict),
        back=verdict.back,
        newest_step=verdict.newest_step,
        then="finish" if verdict.report else recovery.then,
        ok=recovery.ok and not verdict.report,
        report=verdict.report or recovery.report,
        exit_code=verdict.exit_code if verdict.report else recovery.exit_code,
    )
    for name in verdict.suspected:
        turn.node(name, suspicions=turn.job.nodes[name].suspicions + 1)
    _diagnose(turn, verdict.check)


def _diagnose(turn: Turn, names: tuple[str, ...]) -> None:
    for name, reason, block in turn.recovery.evict:
        evict(turn, name, reason, block=block)
    turn.set(phase="diagnosing")
    if turn.recovery.then != "finish":
        check(turn, tuple(name for name in names if turn.job.nodes[name].state == "active"))
    relaunch_if_checked(turn)


def check(turn: Turn, names: tuple[str, ...]) -> None:
    """Ask for a self-check of these nodes; without one they count as well."""
    level = turn.job.policy.cluster.selfcheck
    if level == "off" or not names:
        return
    deadline_s = CHECK_S * (10 if level == "full" else 1)
    for name in names:
        turn.node(name, state="checking", until_s=turn.now_s + deadline_s + ANSWER_S)
    turn.act(SelfCheck(names, level, deadline_s))


def relaunch_if_checked(turn: Turn) -> None:
    """Go on when no node with ranks is still being checked."""
    job = turn.job
    held = [job.nodes[name] for name in job.holders.values()]
    if job.phase != "diagnosing" or any(node.state in ("checking", "suspect") for node in held):
        return
    turn.book("diagnosis")
    recovery = turn.recovery
    if recovery.then == "finish":
        finish(turn, ok=recovery.ok, report=recovery.report, exit_code=recovery.exit_code)
        return
    spent = _spent_budget(turn, recovery.cause)
    if spent:
        finish(turn, ok=False, report=spent, exit_code=1)
        return
    turn.set(phase="allocating", waiting_s=turn.now_s, starved_s=None)
    launch(turn)


def _spent_budget(turn: Turn, cause: str) -> str:
    job, cluster = turn.job, turn.job.policy.cluster
    counted = sum(job.spent_on(name) for name in job.spent if name not in _UNCOUNTED)
    last = job.faults[-1].text if job.faults else ""
    within = f", each within {cluster.restart_window_steps} steps (cluster.restart_window_steps)"
    if cause in _UNCOUNTED:
        return ""
    if counted >= cluster.max_restarts:
        return f"{counted} restarts (cluster.max_restarts){within}; the last for {cause}: {last}"
    if job.spent_on(cause) >= cluster.max_restarts_a_cause:
        spent = f"{job.spent_on(cause)} restarts for {cause} (cluster.max_restarts_a_cause)"
        return f"{spent}{within}: {last}"
    return ""


def grow(turn: Turn) -> None:
    """Back to more data-parallel replicas, at a state saved for it, when machines allow."""
    job = turn.job
    idle = job.phase != "training" or not job.policy.can_save or job.suspicion is not None
    if idle or job.world_nodes >= job.policy.num_nodes:
        return
    count = placement.legal_count(job, len(placement.usable(job)))
    if count is not None and count > job.world_nodes:
        plan(turn, "grow", f"{count} nodes are ready, {job.world_nodes} train")


def condemn(turn: Turn, name: str, reason: str) -> None:
    """A node that did not end its ranks may hold one that nobody can end."""
    turn.open("unkillable", reason, nodes=(name,), ends="quiet")
    evict(turn, name, reason, block=True)
    after_leaving(turn, name)


def stop_again(turn: Turn) -> None:
    """The order may be lost with the driver that gave it."""
    recovery = turn.recovery
    names = tuple(sorted(recovery.waiting & {*turn.job.holders.values()}))
    _stop(turn, replace(recovery, waiting=frozenset(names)))


def evict(turn: Turn, name: str, reason: str, *, block: bool) -> None:
    """The node leaves for good; what waits for it goes on without. Once for each node."""
    node = turn.job.nodes.get(name)
    if node is None or node.state in OVER:
        return
    _remove(turn, node, "evicted")
    if block and node.host and node.host not in turn.job.blocked:
        turn.set(blocked=(*turn.job.blocked, node.host))
    turn.act(EvictNode(name, reason, block))
    turn.say(f"{name} evicted: {reason}")


def lose(turn: Turn, name: str, reason: str, kind: str, *, stays: bool = False) -> None:
    """The node is gone without having been asked. Its backend is told, so that it stays away;
    not where the machine `stays` and only what ran on it is gone."""
    node = turn.job.nodes.get(name)
    if node is None or node.state in OVER:
        return
    fault = Fault(
        kind, (name,), tuple(turn.job.ranks_of(node)), step=turn.job.epoch_step, text=reason
    )
    took_part = node.node_rank is not None
    _remove(turn, node, "lost")
    if not stays:
        turn.act(EvictNode(name, reason, block=False))
    turn.say(f"{name} lost: {reason}")
    if took_part:
        fail(turn, fault)
    never_came = not node.incarnation
    if never_came and turn.job.phase in ("starting", "training"):
        turn.set(starved_s=turn.now_s)  # its successor would fare alike: not at once
    after_leaving(turn, name, stays=stays)


def after_leaving(turn: Turn, name: str, *, stays: bool = False) -> None:
    """Whatever phase was waiting for this node goes on without it; a spare is replaced while
    ranks train on. In other phases the next start asks for spares."""
    stopped(turn, name)
    relaunch_if_checked(turn)
    launch(turn)
    if turn.job.phase in ("starting", "training") and not stays:
        replenish_spares(turn)


def _remove(turn: Turn, node: Node, state: NodeState) -> None:
    turn.forget_node("silent", node.name, state)
    turn.node(node.name, state=state, node_rank=None, before=None, until_s=None)
