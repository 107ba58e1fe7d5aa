"""Start an epoch on the machines that are there, ask for those that are not, or end the job."""

from __future__ import annotations

from dataclasses import replace

from megascale.cluster import placement
from megascale.cluster.actions import Alert, FinishJob, Notify, Replenish, StartEpoch
from megascale.cluster.job import OVER, NodeState, Phase, Spent
from megascale.cluster.ledger import TimeKind
from megascale.cluster.turn import Turn
from megascale.plan.placement.rank_map import RankMap

_WAITING: dict[str, TimeKind] = {"allocating": "idle", "checking": "diagnosis"}


def launch(turn: Turn) -> None:
    """Start an epoch on the machines that are ready, ask for more, or shrink."""
    job = turn.job
    if job.phase not in ("allocating", "checking"):
        return
    available, target = len(placement.usable(job)), job.policy.num_nodes
    if available >= target:
        _start(turn, target)
        return
    missing = target - available - placement.coming(job)
    if missing > 0 and job.starved_s is None:
        _ask_for(turn, missing)
    elif missing > 0 and not job.wanted and job.policy.cluster.shrink and job.epoch:
        count = placement.legal_count(job, available)
        if count is not None:
            turn.act(Alert(f"no machine in place of the lost ones: on with {count} nodes"))
            _start(turn, count)
            return
    checking = bool(turn.job.in_state("checking")) and missing <= 0
    phase: Phase = "checking" if checking else "allocating"
    if phase != turn.job.phase:
        turn.book(_WAITING[turn.job.phase])
        turn.set(phase=phase)


def _ask_for(turn: Turn, missing: int) -> None:
    job = turn.job
    first = not job.nodes
    near = sorted({node.switch for node in placement.usable(job) if node.switch})
    turn.set(wanted=job.wanted + missing)
    turn.act(Replenish(missing, tuple(near), first=first))


def _start(turn: Turn, count: int) -> None:
    job, recovery = turn.job, turn.job.recovery
    turn.book(_WAITING[job.phase])
    network = placement.by_network(job, count)
    places = placement.place(job, count, network)
    node_ranks = {at.node: at.node_rank for at in places}
    nodes = dict(job.nodes)
    for node in placement.usable(job):
        node_rank = node_ranks.get(node.name)
        state: NodeState = "spare" if node_rank is None else "active"
        nodes[node.name] = replace(node, state=state, node_rank=node_rank, until_s=None)
    for node in job.in_state("suspect"):  # its ranks are others' now; it is a spare where it comes
        before: NodeState | None = "spare" if node.before == "active" else node.before
        nodes[node.name] = replace(node, node_rank=None, before=before)
    epoch = job.epoch + 1
    cause = recovery.cause if recovery else ""
    restarts = {**job.restarts, cause: job.restarts.get(cause, 0) + 1} if recovery else job.restarts
    spent = {**job.spent, cause: Spent(job.spent_on(cause) + 1, job.newest_step)}
    turn.set(
        nodes=nodes,
        phase="starting",
        epoch=epoch,
        ranks_epoch=epoch,
        world_nodes=count,
        exited=frozenset(),
        epoch_step=None,
        restarts=restarts,
        spent=spent if recovery else job.spent,
        recovery=None,
        waiting_s=None,
    )
    turn.act(
        StartEpoch(
            epoch,
            places,
            resume=job.policy.resume or job.epoch > 0,
            back=recovery.back if recovery else 0,
            newest_step=recovery.newest_step if recovery else None,
            overrides=job.overrides,
        )
    )
    turn.say(f"epoch {epoch} on {count} nodes")
    if network is not None:
        _tell_of_network(turn, network)
    replenish_spares(turn)


def _tell_of_network(turn: Turn, network: RankMap) -> None:
    """What placing ranks by switches gains, and which hosts nobody knows the switch of."""
    turn.act(
        Notify(
            "ranks are placed by switches: in the order of names bytes between nodes would take "
            f"{network.gain:.2f} times as long, by the model of conflicts"
        )
    )
    assert turn.job.policy.placement is not None, network
    unknown = turn.job.policy.placement.unknown(network.order)
    if unknown:
        turn.act(
            Alert(
                f"not in cluster.topology: {', '.join(unknown[:8])}"
                f"{' and others' if len(unknown) > 8 else ''}; placed as if each were alone on a "
                "switch: add them to the file"
            )
        )


def replenish_spares(turn: Turn, least: int = 0) -> None:
    """Keep the pool of spares filled, unless the backend has just said that it is empty."""
    job = turn.job
    wanted = job.policy.num_nodes + max(least, job.policy.spares)
    missing = wanted - len(job.in_state("spare", "active", "suspect")) - placement.coming(job)
    if missing > 0 and job.starved_s is None:
        _ask_for(turn, missing)


def finish(turn: Turn, *, ok: bool, report: str, exit_code: int = 0) -> None:
    """The job's end: every incident is closed, every node leaves."""
    job = turn.job
    if job.num_drivers > 1:
        report = f"{report} (under {job.num_drivers} drivers, one after the other)"
    well = ok and job.phase == "training" and job.recovery is None  # not one that was stopped
    for incident in job.open:
        turn.close(incident.number, "recovered" if well else "the job ended")
    nodes = {
        name: node if node.state in OVER else replace(node, state="leaving", node_rank=None)
        for name, node in job.nodes.items()
    }
    phase: Phase = "done" if ok else "failed"
    turn.set(phase=phase, nodes=nodes, recovery=None, suspicion=None, report=report)
    turn.act(FinishJob(ok, report, 0 if ok else exit_code or 1))
    turn.say(report)
