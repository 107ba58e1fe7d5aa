"""The decision ladder: which of the signs is the cause, and what is done about it.

ByteRobust's order: what is certain and cheap first. A row of `RUNGS` maps the kind of a sign to its
rung; earlier rows win where several signs came together, because a rank that fails for want of a
peer is not the news.

| rung | evidence | action |
|---|---|---|
| hardware | a device, link or process is sick for certain | evict at once, block the host |
| lost | a node fell silent for good, or its backend says so | replace |
| replicas | parameter hashes differ | evict the minority, go back to where they agreed |
| stop | out of memory, disk full | restart; again within a window: stop with a report |
| numerical | not finite, or a spike | the newest state; then the one before; then stop |
| straggler | slower, or less traffic, over several windows | evict at a saved state, with a spare |
| hang | too late, or no traffic; ranks named | self-check; evict the second time, or if it fails |
| user | an exception of the program, a refused configuration | stop with the first error |
| unexplained | a signal, an exit without a word, a lost peer | self-check, restart |

The same kind at the same step `max_same_fault` times stops the job with a report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megascale.cluster.job import Fault, JobState, Recovery

HARDWARE = (
    "unkillable",
    "xid",
    "ecc_uncorrected",
    "device_lost",
    "device",
    "machine_check",
    "nic",
    "selfcheck",
)
LOST = ("node_lost", "node_gone", "agent_died")
RUNGS: dict[str, str] = {
    **dict.fromkeys(HARDWARE, "hardware"),
    **dict.fromkeys(LOST, "lost"),
    "replicas_differ": "replicas",
    "out_of_memory": "stop",
    "disk_full": "stop",
    "nonfinite": "numerical",
    "loss_spike": "numerical",
    "numerical": "numerical",
    "straggler": "straggler",
    "traffic_fell": "straggler",
    "traffic_fluctuates": "straggler",
    "nic_settings": "straggler",
    "signal": "unexplained",
    "traffic_stopped": "hang",
    "hang": "hang",
    "exception": "user",
    "config": "user",
    "exit": "unexplained",
    "launch": "unexplained",
    "ranks_missing": "unexplained",
    "network": "unexplained",
}
_ORDER = {kind: place for place, kind in enumerate(RUNGS)}
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed? ?out|peer|"
    r"\bgloo\b|\bnccl\b|rendezvous|unreachable|heartbeat",
    re.IGNORECASE,
)
# Exit codes of our own errors (`errors.py`) that say more than "exception" does.
_KIND_OF_CODE = {2: "config", 5: "launch", 6: "numerical"}
_FOR_PEOPLE = (3, 7, 8)  # missing data, an extra, what a machine cannot do: no node is to blame
_SYSTEM_SIGNALS = ("SIGTERM", "SIGKILL", "SIGINT", "SIGHUP")


@dataclass(frozen=True)
class Verdict:
    """check: nodes whose self-check decides whether they stay. report: not empty, then stop."""

    cause: str
    reason: str
    evict: tuple[tuple[str, str, bool], ...] = ()
    check: tuple[str, ...] = ()
    back: int = 0
    newest_step: int | None = None
    report: str = ""
    exit_code: int = 1
    suspected: tuple[str, ...] = ()


def kind_of(kind: str, code: int | None, message: str) -> str:
    """The kind of an exit: what its code says, and "network" for one that misses a peer."""
    if kind in ("exception", "exit", "launch"):
        kind = _KIND_OF_CODE.get(code or 0, kind)
        if code in _FOR_PEOPLE and "error: " in message:
            kind = "config"
    if kind == "numerical" and "data-parallel replicas" in message:
        return "replicas_differ"
    if kind == "exception" and _PEER_LOST.search(message):
        return "network"
    return kind if kind in RUNGS else "exit"


def is_asked_for(signal: str | None) -> bool:
    """A rank that ends by it after the driver asked all to stop is not the news."""
    return signal in _SYSTEM_SIGNALS


def primary(faults: Sequence[Fault]) -> Fault:
    """The sign that explains the others: highest row, then certain, then one that names somebody,
    then the first to arrive."""
    last = len(_ORDER)
    return min(
        faults,
        key=lambda one: (_ORDER.get(one.kind, last), not one.certain, not (one.ranks or one.nodes)),
    )


def judge(job: JobState, recovery: Recovery) -> Verdict:
    """What to do once every rank has stopped. A planned stop without a fault has no cause."""
    if not recovery.faults:
        return Verdict(recovery.planned, f"planned: {recovery.planned}", recovery.evict)
    fault = primary(recovery.faults)
    times = sum(_is_same(fault, earlier) for earlier in job.faults)
    rung = RUNGS.get(fault.kind, "unexplained")
    verdict = _BY_RUNG[rung](_Case(job, fault, recovery.faults))
    limit = job.policy.cluster.max_same_fault
    endless = rung not in ("numerical", "lost", "hardware", "replicas")
    if not verdict.report and endless and times >= limit:
        return Verdict(
            fault.kind,
            verdict.reason,
            report=f"{_told(fault)}: the same fault at the same step {times} times "
            f"(cluster.max_same_fault {limit})",
            exit_code=_code(fault),
        )
    return verdict


@dataclass(frozen=True)
class _Case:
    """The cause, and all the signs that it was chosen from."""

    job: JobState
    fault: Fault
    faults: Sequence[Fault]

    @property
    def told(self) -> str:
        return _told(self.fault)

    @property
    def everybody(self) -> tuple[str, ...]:
        return tuple(name for _, name in sorted(self.job.holders.items()))


def _is_same(fault: Fault, earlier: Fault) -> bool:
    return (fault.kind, fault.ranks, fault.step) == (earlier.kind, earlier.ranks, earlier.step)


def _told(fault: Fault) -> str:
    ranks = f"rank {', '.join(map(str, fault.ranks[:8]))}" if fault.ranks else ""
    nodes = f"node {', '.join(fault.nodes[:8])}" if fault.nodes else ""
    where = " on ".join(part for part in (ranks, nodes) if part)
    step = f" at step {fault.step}" if fault.step is not None else ""
    text = f": {fault.text}" if fault.text else ""
    return f"{fault.kind}{' of ' if where else ''}{where}{step}{text}"


def _code(fault: Fault) -> int:
    return fault.code if fault.code is not None and 0 < fault.code < 256 else 1


def _hardware(case: _Case) -> Verdict:
    sick = {name: one for one in case.faults if one.kind in HARDWARE for name in one.nodes}
    evict = tuple((name, _told(one), True) for name, one in sick.items())
    return Verdict(case.fault.kind, case.told, evict)


def _lost(case: _Case) -> Verdict:
    return Verdict(case.fault.kind, case.told)  # who is lost holds no ranks any more


def _replicas(case: _Case) -> Verdict:
    evict = tuple((name, case.told, True) for name in case.fault.nodes)
    if not case.fault.certain or len(case.fault.nodes) >= len(case.job.holders):
        return Verdict(case.fault.kind, f"{case.told}; no majority", check=case.everybody)
    return Verdict(case.fault.kind, case.told, evict, newest_step=case.fault.agreed_step)


def _stop(case: _Case) -> Verdict:
    window = case.job.policy.cluster.restart_window_steps
    report = (
        f"{case.told}; the last restart for it was less than {window} steps ago "
        "(cluster.restart_window_steps)"
        if case.job.spent_on(case.fault.kind)
        else ""
    )
    return Verdict(case.fault.kind, case.told, report=report, exit_code=_code(case.fault))


def _numerical(case: _Case) -> Verdict:
    same = sum(
        RUNGS.get(one.kind) == "numerical" and one.step == case.fault.step
        for one in case.job.faults
    )
    if same > case.job.policy.cluster.max_same_fault:
        report = f"{case.told}; neither a retry nor an older state helped"
        return Verdict(case.fault.kind, case.told, report=report, exit_code=_code(case.fault))
    check = case.everybody if same == 1 else ()
    return Verdict(
        case.fault.kind,
        case.told,
        check=check,
        back=max(0, same - 1),
        newest_step=case.fault.agreed_step,  # of a jump of the loss: the state before it
    )


def _straggler(case: _Case) -> Verdict:
    return Verdict(
        case.fault.kind, case.told, tuple((name, case.told, True) for name in case.fault.nodes)
    )


def _hang(case: _Case) -> Verdict:
    some = 0 < len(case.fault.nodes) < len(case.job.holders)
    if not some:
        return Verdict(case.fault.kind, f"{case.told}; names no part of it", check=case.everybody)
    again = [name for name in case.fault.nodes if case.job.nodes[name].suspicions]
    evict = tuple((name, f"hung again although it checks out: {case.told}", True) for name in again)
    check = tuple(name for name in case.fault.nodes if name not in again)
    return Verdict(case.fault.kind, case.told, evict, check, suspected=check)


def _user(case: _Case) -> Verdict:
    return Verdict(case.fault.kind, case.told, report=case.told, exit_code=_code(case.fault))


def _unexplained(case: _Case) -> Verdict:
    misses_a_peer = case.fault.kind == "network"  # who says so is well
    named = () if misses_a_peer else case.fault.nodes
    return Verdict(case.fault.kind, case.told, check=named or case.everybody)


_BY_RUNG = {
    "hardware": _hardware,
    "lost": _lost,
    "replicas": _replicas,
    "stop": _stop,
    "numerical": _numerical,
    "straggler": _straggler,
    "hang": _hang,
    "user": _user,
    "unexplained": _unexplained,
}
