"""Every check of a level, in order, within a deadline. Never raises: a node that cannot be checked
is a node that failed.

Checks that can share a process do (`process.py`); one that hangs is ended with its process group
and counted as failed, and the others go on. A speed that is too low is measured once more.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megascale import env
from megascale.cluster.selfcheck import plan, rdma
from megascale.cluster.selfcheck.check import Check
from megascale.cluster.selfcheck.expected import Expected, load_expected
from megascale.cluster.selfcheck.gpus import judge_gpus, num_gpus
from megascale.cluster.selfcheck.judge import (
    judge_host,
    judge_replay,
    judge_speeds,
    merge_speeds,
    speed_key,
)
from megascale.cluster.selfcheck.learned import Learned
from megascale.cluster.selfcheck.numa import numa_nodes
from megascale.cluster.selfcheck.pairs import parse_meeting
from megascale.cluster.selfcheck.process import KILL_WAIT_S, Job, Outcome, run_in_turn
from megascale.cluster.selfcheck.together import all_to_all, hold_meetings, not_held
from megascale.errors import MegascaleError

PROBE, TRAIN = "megascale.cluster.selfcheck.probe", "megascale.train.selfcheck"
# cuBLAS gives the same bits each time only with a workspace of a fixed size; it looks once.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}


def run_node_checks(
    level: str,
    deadline_s: float,
    run_dir: Path,
    expected: Path | None = None,
    peers: Sequence[str] = (),
) -> dict[str, Any]:
    """Check this node. The report, as JSON holds it:

    ok      of the node's own checks: none failed and at least one passed
    checks  in order: name, ok (True, False, None: did not apply), value, unit, expected, seconds,
            reason, detail
    pairs   peer to whether the all-reduce with it was right; which end of a failed pair is to
            blame, `pairs.accuse` tells from those of all nodes. Not part of `ok`
    node, level, seconds, not_applicable (names)

    deadline_s  from now; every check after it failed for want of time
    run_dir     what is learned is kept in its folder selfcheck/
    expected    TOML laid over `expected.toml`
    peers       meetings of `pairs.meetings`, in order; held only if the node's own checks passed
    """
    start = time.monotonic()
    try:
        return _run(level, start, start + deadline_s - KILL_WAIT_S, run_dir, expected, peers)
    except MegascaleError as error:
        failed = Check("setup", False, time.monotonic() - start, str(error))
    except Exception as error:  # noqa: BLE001 - the agent's border: a failed check, not a dead agent
        failed = Check("setup", False, time.monotonic() - start, f"{type(error).__name__}: {error}")
    return _report(level, start, [failed], [], {})


@dataclass
class _Run:
    """What the checks of one run share."""

    level: str
    deadline: float  # of time.monotonic()
    run_dir: Path
    expected: Expected
    learned: Learned
    faults: dict[str, str]
    cpu_kind: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def all_of(self, names: Sequence[str]) -> None:
        """Fill `outcomes`."""
        later = list(names[3:])
        self.in_turn(PROBE, names[:3], later)
        gpus = num_gpus(self.outcomes["gpus"])
        if "rdma" in names:
            later.remove("rdma")
            self.outcomes["rdma"] = self._rdma(gpus, later)
        torch_checks = [name for name in later if name in ("gemm", "mesh", "replay")]
        if "mesh" in later and gpus == 0:
            torch_checks.remove("mesh")
            self.outcomes["mesh"] = Outcome(0.0, None, "absent", "no GPU to copy to")
        self.in_turn(TRAIN, torch_checks, [name for name in later if name == "all_to_all"])
        if "all_to_all" in names:
            limit = min(self.deadline, time.monotonic() + plan.LIMITS_S["all_to_all"])
            if limit - time.monotonic() < 0.1:
                self.outcomes["all_to_all"] = Outcome(0.0, None, "late", "no time was left")
            else:
                fault = self.faults.get("all_to_all", "")
                self.outcomes["all_to_all"] = all_to_all(self._gpus_of_torch(), limit, fault)

    def _rdma(self, gpus: int, later: Sequence[str]) -> Outcome:
        ports = rdma.read_ports()
        if not ports:
            return Outcome(0.0, None, "absent", "no RDMA port is up in /sys/class/infiniband")
        if shutil.which(rdma.PROGRAM) is None:
            reason = f"{len(ports)} RDMA ports are up, but {rdma.PROGRAM} is not installed"
            return Outcome(0.0, None, "absent", reason + ": install perftest")
        nodes = list(numa_nodes(Path("/"), os.sched_getaffinity(0)))
        start = time.monotonic()
        limit = Job("rdma", {}, plan.LIMITS_S["rdma"], plan.reserve_s(later))
        tests = rdma.plan_tests(ports, nodes, gpus)
        return rdma.measure(tests, limit.limit(start, self.deadline))

    def in_turn(self, module: str, names: Sequence[str], after: Sequence[str]) -> None:
        """Do the workloads of these checks, and those anew whose speed was too low."""
        given = {
            name: plan.arguments(name, self.level, self.run_dir, self.expected, self.cpu_kind)
            for name in names
        }
        jobs = plan.jobs(names, given, after, self.faults)
        self.outcomes |= run_in_turn(module, jobs, self.deadline, DETERMINISTIC)
        again = [job for job in jobs if self.judge(job.name).speed_only]
        took = sum(self.outcomes[job.name].seconds for job in again)
        left = self.deadline - time.monotonic() - plan.reserve_s(after)
        if again and took < left:
            for name, second in run_in_turn(module, again, self.deadline, DETERMINISTIC).items():
                self.outcomes[name] = merge_speeds(self.outcomes[name], second)

    def judge(self, name: str) -> Check:
        outcome = self.outcomes[name]
        if outcome.kind == "absent":
            check = Check(name, None, outcome.seconds, outcome.reason)
        elif name == "host":
            check = judge_host(outcome)
        elif name == "gpus":
            check = judge_gpus(outcome, self.learned.num_gpus)
        elif name == "replay":
            check = judge_replay(outcome, self.learned.hashes)
        else:
            check = judge_speeds(
                name,
                outcome,
                self.expected,
                self.learned.speed,
                factor=plan.factor(self.faults, name),
                tolerance=self._tolerance(name),
            )
        if check.ok and name in ("gemm", "replay"):
            check = self._all_gpus_seen(check)
        if check.ok is not False and self.faults.get(name) == "fail":
            check = replace(check, ok=False, reason="MEGASCALE_SELFCHECK_FAULT says so")
        return check

    def _tolerance(self, name: str) -> str:
        on_cpu = name == "all_to_all" and self._gpus_of_torch() < 2
        return "all_to_all_cpu" if on_cpu else name

    def _all_gpus_seen(self, check: Check) -> Check:
        """Fails where torch sees fewer than NVML; a part that was chosen is all that counts."""
        seen = (self.outcomes[check.name].result or {}).get("gpus", 0)
        there = num_gpus(self.outcomes["gpus"])
        if seen >= there or (seen and env.gpus_are_chosen()):
            return check
        reason = f"torch sees {seen} of {there} GPUs: install its CUDA build for this driver"
        return replace(check, ok=False, reason=reason)

    def _gpus_of_torch(self) -> int:
        result = self.outcomes["gemm"].result
        return num_gpus(self.outcomes["gpus"]) if result is None else int(result["gpus"])


def _run(
    level: str,
    start: float,
    deadline: float,
    run_dir: Path,
    expected: Path | None,
    peers: Sequence[str],
) -> dict[str, Any]:
    meetings = [parse_meeting(text) for text in peers]
    names = plan.names(level)
    faults = env.selfcheck_faults()
    plan.check_faults(faults)
    table, learned = load_expected(expected), Learned(run_dir, env.hostname())
    # meetings come last and get what is left: at least a third of the time
    own = deadline - (deadline - start) / 3 if meetings else deadline
    run = _Run(level, own, run_dir, table, learned, faults, plan.cpu_kind())
    run.all_of(names)
    checks = [run.judge(name) for name in names]
    note = _learn(run, checks)
    if any(check.ok is False for check in checks):
        met = not_held(meetings, "this node failed its own checks")
    else:
        met = hold_meetings(meetings, deadline, faults)
    pairs = {m.peer: check.ok is True for m, check in zip(meetings, met, strict=True)}
    return _report(level, start, checks, met, pairs) | ({"note": note} if note else {})


def _learn(run: _Run, checks: Sequence[Check]) -> str:
    """Keep what passed; the reason where it could not be kept."""
    for check in checks:
        result = run.outcomes[check.name].result if check.name in run.outcomes else None
        if result is None or check.name in run.faults:
            continue
        if check.ok:
            for rate in result.get("rates", ()):
                run.learned.keep_speed(speed_key(check.name, rate), rate["value"])
        for device in result.get("hashes", ()):
            if len(set(device["runs"])) == 1:
                run.learned.keep_hash(device["kind"], device["runs"][0])
    run.learned.keep_num_gpus(num_gpus(run.outcomes["gpus"]))
    try:
        run.learned.save()
    except OSError as error:
        return f"what was measured could not be kept in {run.run_dir} ({error.strerror})"
    return ""


def _report(
    level: str,
    start: float,
    checks: Sequence[Check],
    met: Sequence[Check],
    pairs: dict[str, bool],
) -> dict[str, Any]:
    passed = [check.ok for check in checks]
    every = [*checks, *met]
    return {
        "ok": False not in passed and True in passed,
        "node": env.hostname(),
        "level": level,
        "seconds": round(time.monotonic() - start, 3),
        "checks": [check.as_json() for check in every],
        "not_applicable": [check.name for check in every if check.ok is None],
        "pairs": pairs,
    }
