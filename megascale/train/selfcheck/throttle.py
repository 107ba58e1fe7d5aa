"""Whether the CPU quota of this process's control group keeps it from running.

CPU time alone would not show it: a process that may run a fifth of the time runs fast then. Periods
are counted, not the time lost in them: the kernel adds that up late and for each CPU apart.
"""

from __future__ import annotations

from pathlib import Path

LEAST_PERIODS = 5  # of usually 0.1 s; fewer say nothing


def quota_periods(root: Path = Path("/")) -> tuple[int, int]:
    """(periods, those in which the quota was used up) of the group until now; zeros without one."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0, 0
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in ("cpu", "cpu,cpuacct") if controllers else ("", "unified"):
            file = root / "sys/fs/cgroup" / mount / path.lstrip("/") / "cpu.stat"
            try:
                counters = dict(entry.split() for entry in file.read_text().splitlines())
                return int(counters["nr_periods"]), int(counters["nr_throttled"])
            except (OSError, ValueError, KeyError):
                continue
    return 0, 0


_START = quota_periods()


def throttled_share() -> float:
    """Of the periods since this module was imported."""
    periods, throttled = (now - then for now, then in zip(quota_periods(), _START, strict=True))
    return throttled / periods if periods >= LEAST_PERIODS else 0.0
