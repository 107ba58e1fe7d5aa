"""`decide`'s answers to what ranks do: start, step, hang, exit; and to what detectors see."""

from __future__ import annotations

from dataclasses import replace

from megascale.cluster import recovery
from megascale.cluster.actions import Alert, DumpStacks
from megascale.cluster.job import Fault, Suspicion
from megascale.cluster.ladder import RUNGS, is_asked_for, kind_of
from megascale.cluster.launching import finish, replenish_spares
from megascale.cluster.transitions import (
    Found,
    HangSuspected,
    RankExited,
    RanksStarted,
    StepReached,
)
from megascale.cluster.turn import Turn


def rank_exited(turn: Turn, event: RankExited) -> None:
    job = turn.job
    if event.epoch != job.ranks_epoch or not 0 <= event.rank < job.world_size:
        return
    if event.code == 0:
        turn.set(exited=job.exited | {event.rank})
        if len(turn.job.exited) == job.world_size and job.phase in ("starting", "training"):
            _all_exited(turn)
        return
    if job.phase == "stopping" and is_asked_for(event.signal):
        return
    kind = kind_of(event.kind, event.code, event.message)
    text = event.message or (event.signal or f"exit code {event.code}")
    step = job.epoch_step if event.step is None else event.step
    nodes = job.nodes_of((event.rank,))
    turn.say(f"rank {event.rank} exited {event.code}: {text}")
    fault = Fault(kind, nodes, (event.rank,), step, text, code=event.code, signal=event.signal)
    if kind == "replicas_differ":  # who says so is as likely well as sick
        fault = replace(fault, nodes=(), ranks=(), certain=False)
    recovery.fail(turn, fault)


def _all_exited(turn: Turn) -> None:
    job = turn.job
    turn.book("useful" if (job.epoch_step or 0) >= job.newest_step else "replay")
    for incident in job.open:
        turn.close(incident.number, "recovered")
    finish(turn, ok=True, report=f"all {job.world_size} ranks ended well")


def ranks_started(turn: Turn, event: RanksStarted) -> None:
    if event.epoch == turn.job.ranks_epoch and turn.job.phase == "starting":
        turn.book("restart")
        turn.set(phase="training")


def step_reached(turn: Turn, event: StepReached) -> None:
    job = turn.job
    stepping = job.phase in ("starting", "training")
    if event.epoch != job.ranks_epoch or not stepping:
        return
    if job.epoch_step is not None and event.step <= job.epoch_step:
        return
    before = event.step - 1 if job.epoch_step is None else job.epoch_step
    replayed = max(0, min(event.step, job.newest_step) - before)
    booked = job.ledger.book_steps(
        turn.now_s,
        new=event.step - before - replayed,
        replayed=replayed,
        saved_s=event.saved_s,
    )
    if job.phase == "starting":  # nobody said when the first step began: all of it was the start
        booked = job.ledger.book(turn.now_s, "restart")
    turn.set(
        ledger=booked,
        phase="training",
        epoch_step=event.step,
        newest_step=max(job.newest_step, event.step),
    )
    if job.suspicion is not None:
        turn.close(job.suspicion.incident, f"passed: step {event.step} was reached")
        turn.set(suspicion=None)
    for incident in turn.job.open:
        if incident.ends == "step" and incident.epoch < event.epoch:
            turn.close(incident.number, f"recovered: step {event.step} of epoch {event.epoch}")


def hang_suspected(turn: Turn, event: HangSuspected) -> None:
    job = turn.job
    if job.phase not in ("starting", "training") or job.suspicion is not None:
        return
    turn.book("detection" if job.phase == "training" else "restart")
    nodes = job.nodes_of(event.ranks)
    number = turn.open("hang", event.reason, nodes=nodes, ranks=event.ranks[:64], step=event.step)
    turn.set(suspicion=Suspicion(turn.now_s, event.ranks[:64], number, event.step))
    turn.act(DumpStacks(tuple(range(job.world_size))))
    turn.say(f"no progress: {event.reason}")


# ---------------------------------------------------------------- detectors


def found(turn: Turn, event: Found) -> None:
    job, finding = turn.job, event.finding
    nodes = job.nodes_of(finding.ranks)
    agreed = finding.evidence.get("agreed_step")
    fault = Fault(
        finding.kind,
        nodes,
        finding.ranks,
        job.epoch_step if finding.step is None else finding.step,
        finding.told(),
        certain=finding.certain,
        agreed_step=agreed if isinstance(agreed, int) else None,
    )
    if finding.kind == "hang":
        if job.suspicion is not None or job.phase == "stopping":
            recovery.fail(turn, fault)
        return
    only_told = finding.kind == "nic_settings" and job.policy.cluster.nic_settings == "warn"
    if finding.kind not in RUNGS or only_told or not _is_certain(turn, fault):
        turn.open(finding.kind, fault.text, nodes=nodes, ranks=finding.ranks, ends="quiet")
        where = f"ranks {list(finding.ranks)[:8]} of {', '.join(nodes[:8]) or 'no node'}"
        turn.act(Alert(f"{finding.kind} at {where}: {fault.text}"))
    elif RUNGS[finding.kind] == "straggler":
        _straggler(turn, fault)
    else:
        recovery.fail(turn, fault)


def _is_certain(turn: Turn, fault: Fault) -> bool:
    """For certain, or the second such alert while the first is open. What isolates a node at a
    saved state has lasted long enough before it is certain."""
    if RUNGS[fault.kind] == "straggler":
        return fault.certain
    if fault.kind == "replicas_differ":  # that they do is certain; who, its rung asks
        return True
    known = turn.job.incident(fault.kind)
    again = known is not None and known.ends == "quiet" and bool({*known.ranks} & {*fault.ranks})
    return fault.certain or again


def _straggler(turn: Turn, fault: Fault) -> None:
    """Not worth a step: evicted at a saved state, once somebody can take its place."""
    job = turn.job
    if job.phase != "training" or not fault.nodes:
        return
    number = turn.open(fault.kind, fault.text, nodes=fault.nodes, ranks=fault.ranks)
    if len(job.in_state("spare")) >= len(fault.nodes):
        reason = f"{fault.kind}: {fault.text}"
        evict = tuple((name, reason, True) for name in fault.nodes)
        told = f"{', '.join(fault.nodes)}: {reason}"
        recovery.plan(turn, "straggler", told, incident=number, evict=evict)
        return
    turn.act(Alert(f"{fault.kind}: {', '.join(fault.nodes)} stays: there is no spare"))
    turn.set(starved_s=None)
    replenish_spares(turn, least=len(fault.nodes))
