"""Which checks a level has, in order, how long each may take, and what its workload is told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale.cluster.selfcheck.expected import Expected
from megascale.cluster.selfcheck.numa import numa_nodes
from megascale.cluster.selfcheck.process import Job
from megascale.errors import ConfigError

LIGHT = ("host", "gpus", "memory", "gemm", "replay")
FULL = ("host", "gpus", "memory", "rdma", "gemm", "mesh", "replay", "all_to_all")
LEVELS: Mapping[str, Sequence[str]] = {"light": LIGHT, "full": FULL}
PAIRS = "neighbours"

# Most seconds of a healthy but busy node, several times what an idle one needs. The first workload
# with torch imports it; a GPU's part makes a CUDA context.
LIMITS_S = {
    "host": 5.0,
    "gpus": 15.0,
    "memory": 15.0,
    "rdma": 120.0,
    "gemm": 30.0,
    "mesh": 40.0,
    "replay": 30.0,
    "all_to_all": 40.0,
}
# What each needs in an ordinary case; so much is kept for those that come after one that hangs.
NEEDS_S = {
    "host": 0.5,
    "gpus": 1.0,
    "memory": 1.5,
    "rdma": 1.0,
    "gemm": 4.0,
    "mesh": 3.0,
    "replay": 3.0,
    "all_to_all": 5.0,
}
KINDS = ("fail", "hang", "crash", "flip")


def names(level: str) -> Sequence[str]:
    if level not in LEVELS:
        raise ConfigError(f"level {level!r}; legal: {', '.join(LEVELS)}")
    return LEVELS[level]


def check_faults(faults: Mapping[str, str]) -> None:
    """ConfigError for a fault that no check can have."""
    for name, what in faults.items():
        if name not in (*FULL, PAIRS):
            raise ConfigError(
                f"MEGASCALE_SELFCHECK_FAULT names {name!r}; checks: {', '.join((*FULL, PAIRS))}"
            )
        if what == "flip" and name != "replay":
            raise ConfigError(f"MEGASCALE_SELFCHECK_FAULT has {name}:flip; only replay can flip")
        if what in ("hang", "crash") and name == "rdma":
            raise ConfigError(f"MEGASCALE_SELFCHECK_FAULT has {what}:rdma; rdma cannot do that")
        if what not in KINDS and name in ("host", "gpus", "replay", PAIRS):
            raise ConfigError(f"MEGASCALE_SELFCHECK_FAULT has {name}:{what}; it is no speed")


def reserve_s(later: Sequence[str]) -> float:
    """Seconds that a check leaves to those after it, however long its own limit is."""
    return sum(NEEDS_S[name] for name in later)


def arguments(
    name: str, level: str, run_dir: Path, expected: Expected, cpu_kind: str
) -> dict[str, Any]:
    full = level == "full"
    table: dict[str, dict[str, Any]] = {
        "host": {"run_dir": str(run_dir), "limits": dict(expected.host)},
        "gpus": {},
        "memory": {"kind": cpu_kind, "seconds": 1.0 if full else 0.3},
        "gemm": {
            "cpu_kind": cpu_kind,
            "seconds": 2.0 if full else 0.4,
            "cores": 16 if full else 4,
        },
        "mesh": {
            "repeats": 8,
            "nodes": numa_nodes(Path("/"), os.sched_getaffinity(0)) if name == "mesh" else {},
        },
        "replay": {"cpu_kind": cpu_kind},
    }
    return table[name]


def jobs(
    wanted: Sequence[str],
    given: Mapping[str, Mapping[str, Any]],
    after: Sequence[str],
    faults: Mapping[str, str],
) -> list[Job]:
    """given: arguments by check; after: the checks that follow all of these"""
    found = []
    for number, name in enumerate(wanted):
        later = [*wanted[number + 1 :], *after]
        fault = faults.get(name, "")
        extra: dict[str, Any] = {}
        if fault in ("hang", "crash"):
            extra["fault"] = fault
        elif fault == "flip":
            extra["flip"] = True
        found.append(Job(name, {**given[name], **extra}, LIMITS_S[name], reserve_s(later)))
    return found


def factor(faults: Mapping[str, str], name: str) -> float:
    fault = faults.get(name, "")
    return 1.0 if not fault or fault in KINDS else float(fault)


def cpu_kind(root: Path = Path("/")) -> str:
    """The processor's name, as the kernel gives it."""
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"
