"""Checks of several processes: all-to-all inside the node, all-reduces with other nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from megascale import env
from megascale.cluster.selfcheck.check import Check
from megascale.cluster.selfcheck.pairs import Meeting
from megascale.cluster.selfcheck.process import Job, Outcome, run_in_turn, run_together
from megascale.cluster.selfcheck.process import worker_command as command

TRAIN = "megascale.train.selfcheck"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # a host name may resolve to an address that is not ours
CPU_RANKS = 2
CPU_MEGABYTES, GPU_MEGABYTES = 8, 256
PAIR_MEGABYTES = 16
MARGIN_S = 1.0  # a library gives up before it is ended, so that it says what it waited for


def all_to_all(num_gpus: int, limit: float, fault: str) -> Outcome:
    """Between all GPUs, or two processes of a CPU; the slowest rank's rate as the node's.

    fault  "hang" or "crash" on purpose, of the last rank
    """
    ranks = num_gpus if num_gpus >= 2 else CPU_RANKS
    device, megabytes = ("cuda", GPU_MEGABYTES) if num_gpus >= 2 else ("cpu", CPU_MEGABYTES)
    port = env.free_port()
    commands = []
    for rank in range(ranks):
        arguments = {
            "rank": rank,
            "world_size": ranks,
            "port": port,
            "device": device,
            "megabytes": megabytes,
            "timeout_s": max(1.0, limit - time.monotonic() - MARGIN_S),
        }
        if fault in ("hang", "crash") and rank == ranks - 1:
            arguments["fault"] = fault
        commands.append(command(TRAIN, [Job("all_to_all", arguments, 0.0)]))
    start = time.monotonic()
    outcomes = run_together(commands, "all_to_all", limit, LOOPBACK if device == "cpu" else None)
    seconds = time.monotonic() - start
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.result is None}
    if failed:
        # who died or spoke first is the cause of who was still waiting
        order = ("died", "error", "hung", "late")
        ranked = sorted(failed, key=lambda rank: order.index(failed[rank].kind))
        reasons = [f"rank {rank} of {ranks}: {failed[rank].reason}" for rank in ranked[:4]]
        return Outcome(seconds, None, failed[ranked[0]].kind, "; ".join(reasons))
    rates = [rate for outcome in outcomes for rate in (outcome.result or {})["rates"]]
    slowest = min(rates, key=lambda rate: float(rate["value"]))
    rate = {**slowest, "at": f"{ranks} {'GPUs' if device == 'cuda' else 'processes'}"}
    return Outcome(seconds, {"rates": [rate], "unit": "GB/s"})


def hold_meetings(
    meetings: Sequence[Meeting], deadline: float, faults: Mapping[str, str]
) -> list[Check]:
    """An all-reduce with each peer in turn.

    Each may last twice as long as the one before: a peer that waits in vain for its first partner
    comes late to its second, and that one waits for it.
    """
    checks = []
    for number, meeting in enumerate(meetings):
        now = time.monotonic()
        share = 2**number / sum(2**later for later in range(number, len(meetings)))
        limit_s = (deadline - now) * share
        arguments = {
            "host": meeting.host,
            "port": meeting.port,
            "rank": meeting.rank,
            "megabytes": PAIR_MEGABYTES,
            "timeout_s": max(1.0, limit_s - MARGIN_S),
        }
        if faults.get("neighbours") in ("hang", "crash"):
            arguments["fault"] = faults["neighbours"]
        job = Job("neighbours", arguments, limit_s)
        outcome = run_in_turn(TRAIN, [job], now + limit_s)["neighbours"]
        checks.append(_met(meeting, outcome, faults.get("neighbours") == "fail"))
    return checks


def not_held(meetings: Sequence[Meeting], reason: str) -> list[Check]:
    return [Check(f"neighbours:{meeting.peer}", None, reason=reason) for meeting in meetings]


def _met(meeting: Meeting, outcome: Outcome, fails: bool) -> Check:
    name = f"neighbours:{meeting.peer}"
    if outcome.result is None:
        return Check(name, False, outcome.seconds, outcome.reason)
    if fails:
        return Check(name, False, outcome.seconds, "MEGASCALE_SELFCHECK_FAULT says so")
    gb_s = float(outcome.result["gb_s"])
    return Check(name, True, outcome.seconds, "", gb_s, "GB/s")
