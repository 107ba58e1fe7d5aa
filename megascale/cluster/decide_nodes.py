"""`decide`'s answers to events of nodes: they join, fall silent, are sick, pass or fail a check."""

from __future__ import annotations

from megascale.cluster import recovery
from megascale.cluster.actions import Alert, EvictNode, Notify, StopEpoch
from megascale.cluster.job import OVER, Fault, Node, NodeState
from megascale.cluster.launching import finish, launch, replenish_spares
from megascale.cluster.transitions import (
    Allocated,
    CheckDone,
    EvictRequested,
    HardwareSeen,
    NodeGone,
    NodeHeard,
    NodeJoined,
    NodeSilent,
)
from megascale.cluster.turn import QUIET_S, Turn


def node_joined(turn: Turn, event: NodeJoined) -> None:
    job = turn.job
    if event.epoch > job.epoch:  # a journal that lost its end knows an older one
        turn.set(epoch=event.epoch)
    if event.host in job.blocked:
        turn.act(EvictNode(event.node, f"its host {event.host} is blocked", block=False))
        turn.say(f"{event.node} refused: its host {event.host} is blocked")
        return
    old = job.nodes.get(event.node)
    if old is not None and old.incarnation == event.incarnation and old.state not in OVER:
        _readopt(turn, old, event)
        return
    if old is not None and old.state not in OVER and old.incarnation:
        recovery.lose(turn, event.node, "its agent started anew", "agent_died", stays=True)
    turn.put(
        Node(
            event.node,
            "joining",
            incarnation=event.incarnation,
            host=event.host,
            ip=event.ip,
            switch=event.switch,
            suspicions=old.suspicions if old else 0,
        )
    )
    turn.say(f"{event.node} joined")
    if event.stale or event.ranks:
        turn.act(StopEpoch(turn.job.epoch, (event.node,)))  # whose they were nobody knows
    if turn.job.policy.cluster.selfcheck == "off":
        _becomes_usable(turn, turn.job.nodes[event.node])
    else:
        recovery.check(turn, (event.node,))
        launch(turn)


def _readopt(turn: Turn, node: Node, event: NodeJoined) -> None:
    """The same agent again: after a restart of the driver, or of the way between them."""
    job = turn.job
    node = _back(turn, node)
    if job.phase not in ("starting", "training") or node.node_rank is None:
        recovery.relaunch_if_checked(turn)
        launch(turn)
        return
    missing = tuple(
        rank for rank in job.ranks_of(node) if rank not in event.ranks and rank not in job.exited
    )
    if missing and job.phase == "training":
        text = f"{node.name} joined again without ranks {list(missing)[:8]}"
        recovery.fail(turn, Fault("ranks_missing", (node.name,), missing, job.epoch_step, text))
    else:
        turn.say(f"{node.name} readopted with {len(event.ranks)} ranks")


def _back(turn: Turn, node: Node) -> Node:
    """A suspect that is heard is what it was before."""
    if node.state != "suspect":
        return node
    turn.forget_node("silent", node.name, "flap: heard again in time")
    turn.act(Notify(f"{node.name} is heard again: a flap"))
    return turn.node(node.name, state=node.before or "spare", before=None)


def node_heard(turn: Turn, event: NodeHeard) -> None:
    node = turn.job.nodes.get(event.node)
    if node is not None and node.state == "suspect":
        _back(turn, node)
        recovery.relaunch_if_checked(turn)
        launch(turn)
        recovery.grow(turn)


def node_silent(turn: Turn, event: NodeSilent) -> None:
    job, cluster = turn.job, turn.job.policy.cluster
    node = job.nodes.get(event.node)
    if node is None or node.state in OVER or not node.incarnation:
        return
    text = f"{node.name} was not heard for {event.silence_s:.1f} s"
    if event.silence_s >= cluster.lost_after_s:
        recovery.lose(turn, node.name, text, "node_lost")
    elif event.silence_s >= cluster.suspect_after_s and node.state != "suspect":
        turn.node(node.name, state="suspect", before=node.state)
        turn.open("silent", text, nodes=(node.name,), ends="heard")
        turn.say(text)


def node_gone(turn: Turn, event: NodeGone) -> None:
    recovery.lose(turn, event.node, event.reason or "its machine is gone", "node_gone")


def allocated(turn: Turn, event: Allocated) -> None:
    job = turn.job
    turn.set(wanted=max(0, job.wanted - event.asked))
    until_s = turn.now_s + job.policy.cluster.init_deadline_s
    for name in event.names:
        known = turn.job.nodes.get(name)
        if known is None or known.state in OVER:
            turn.put(Node(name, "joining", until_s=until_s))
    if len(event.names) < event.asked:
        turn.set(starved_s=turn.now_s)
        turn.act(Alert(f"{len(event.names)} of {event.asked} machines: {event.error or 'no more'}"))
        if not job.epoch and not job.nodes and event.error:
            finish(turn, ok=False, report=event.error, exit_code=5)
            return
    launch(turn)
    replenish_spares(turn)


def check_done(turn: Turn, event: CheckDone) -> None:
    node = turn.job.nodes.get(event.node)
    if node is None or "checking" not in (node.state, node.before):
        return
    if event.ok:
        _becomes_usable(turn, node)
        return
    reason = f"self-check: {', '.join(event.failures) or 'failed'}"
    turn.open("selfcheck", reason, nodes=(node.name,), ends="quiet")
    recovery.evict(turn, node.name, reason, block=True)
    recovery.after_leaving(turn, node.name)


def _becomes_usable(turn: Turn, node: Node) -> None:
    state: NodeState = "spare" if node.node_rank is None else "active"
    if node.state == "suspect":
        turn.node(node.name, before=state, until_s=None)
        return
    turn.node(node.name, state=state, until_s=None)
    recovery.relaunch_if_checked(turn)
    launch(turn)
    recovery.grow(turn)


def hardware_seen(turn: Turn, event: HardwareSeen) -> None:
    node = turn.job.nodes.get(event.node)
    if node is None or node.state in OVER:
        return
    text = f"{event.kind} {event.detail}".strip()
    if not event.certain and not _second_alert(turn, node, event.kind):
        turn.open(event.kind, text, nodes=(node.name,), ends="quiet")
        turn.act(Alert(f"{node.name}: {text}"))
        return
    job = turn.job
    if node.node_rank is not None and job.phase in ("starting", "training", "stopping"):
        fault = Fault(
            "nic" if event.kind.startswith("nic") else event.kind,
            (node.name,),
            event.ranks or tuple(job.ranks_of(node)),
            job.epoch_step,
            text,
        )
        recovery.fail(turn, fault)
        return
    turn.open(event.kind, text, nodes=(node.name,), ends="quiet")
    recovery.evict(turn, node.name, text, block=True)
    recovery.after_leaving(turn, node.name)


def _second_alert(turn: Turn, node: Node, kind: str) -> bool:
    fresh = tuple((k, at_s) for k, at_s in node.alerts if turn.now_s - at_s < QUIET_S)
    turn.node(node.name, alerts=(*fresh[-15:], (kind, turn.now_s)))
    return any(k == kind for k, _ in fresh)


def evict_requested(turn: Turn, event: EvictRequested) -> None:
    node = turn.job.nodes.get(event.node)
    if node is None or node.state in OVER:
        turn.act(Notify(f"evict {event.node}: there is no such node"))
        return
    wish = (event.node, event.reason, event.block)
    if node.node_rank is not None and turn.job.phase in ("starting", "training"):
        recovery.plan(turn, "evict", f"{event.node}: {event.reason}", evict=(wish,))
    elif node.node_rank is not None and turn.job.phase == "stopping":
        turn.recover(evict=(*turn.recovery.evict, wish))
    else:
        recovery.evict(turn, event.node, event.reason, block=event.block)
        recovery.after_leaving(turn, event.node)
