"""Is the host fit to train: memory, disk, descriptors, /dev/shm, clock, load, kernel messages.

Each fact has a limit of `expected.toml`. What may have another cause than the host (an OOM kill, an
unsynchronised clock) is a note, never a failure: an innocent node must not be evicted for the job's
doing.
"""

from __future__ import annotations

import os
import resource
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megascale.cluster.selfcheck.kernel_log import (
    match_records,
    read_records,
    seconds_since_boot,
)

OLDEST_CLOCK = datetime(2025, 1, 1, tzinfo=UTC).timestamp()
PROBE_BYTES = 1 << 20
GIB = 1 << 30


def read_host(arguments: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Everything that a process can read of its host.

    arguments  run_dir; limits: the table [host]; root: "/" but in tests
    Returns failures (texts, the worst first) and notes (name to value).
    """
    root, limits = Path(arguments.get("root", "/")), arguments["limits"]
    failures: list[str] = []
    notes: dict[str, Any] = {}
    tell("memory")
    _memory(root, limits, failures, notes)
    tell("file descriptors and load")
    _descriptors_and_load(root, limits, failures, notes)
    tell("clock")
    _clock(root, failures, notes)
    tell("/dev/shm")
    _space(root / "dev/shm", limits["least_shm_free_bytes"], failures, notes, "shm")
    tell(f"the run folder {arguments['run_dir']}")
    _run_folder(Path(arguments["run_dir"]), limits, failures, notes)
    tell("the kernel's messages")
    _kernel(root, failures, notes)
    return {"failures": failures, "notes": notes}


def _memory(
    root: Path, limits: Mapping[str, float], failures: list[str], notes: dict[str, Any]
) -> None:
    info = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        info[name] = int(rest.split()[0]) * 1024
    free, total = info["MemAvailable"], info["MemTotal"]
    notes |= {"memory_free_bytes": free, "memory_bytes": total}
    if free < limits["least_memory_free_share"] * total:
        failures.append(
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB of memory are free; at least "
            f"{limits['least_memory_free_share']:.0%} must be: end what holds it"
        )
    with suppress(OSError, ValueError):
        counters = dict(
            line.split() for line in (root / "proc/vmstat").read_text().splitlines() if line
        )
        notes["oom_kills_since_boot"] = int(counters["oom_kill"])


def _descriptors_and_load(
    root: Path, limits: Mapping[str, float], failures: list[str], notes: dict[str, Any]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    notes["file_descriptors"] = soft
    if soft != resource.RLIM_INFINITY and soft < limits["least_file_descriptors"]:
        failures.append(
            f"a process may open {soft} files (hard limit {hard}); at least "
            f"{limits['least_file_descriptors']:.0f}: raise ulimit -n"
        )
    cpus = len(os.sched_getaffinity(0))
    load = float((root / "proc/loadavg").read_text().split()[0])
    notes |= {"cpus": cpus, "load_1min": load}
    if load > limits["most_load_per_cpu"] * cpus:
        failures.append(
            f"the load of the last minute is {load:.1f} on {cpus} CPUs; at most "
            f"{limits['most_load_per_cpu']:.0f} a CPU: end what else runs here"
        )


def _clock(root: Path, failures: list[str], notes: dict[str, Any]) -> None:
    wall, steady = time.time(), time.monotonic()
    if wall < OLDEST_CLOCK:
        failures.append(
            f"the clock says {datetime.fromtimestamp(wall, UTC):%Y-%m-%d}: set it (NTP)"
        )
    time.sleep(0.02)
    step = (time.time() - wall) - (time.monotonic() - steady)
    if abs(step) > 0.5:
        failures.append(f"the clock jumped by {step:.1f} s during the check: see its NTP service")
    source = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    with suppress(OSError):
        notes["clock_source"] = source.read_text().strip()


def _space(path: Path, least: float, failures: list[str], notes: dict[str, Any], name: str) -> None:
    try:
        stat = os.statvfs(path)
    except OSError as error:
        failures.append(f"{path} cannot be read ({error.strerror}): mount it")
        return
    free = stat.f_bavail * stat.f_frsize
    notes[f"{name}_free_bytes"] = free
    if free < least:
        failures.append(
            f"{free / GIB:.2f} GiB are free in {path}; at least {least / GIB:.2f}: make room"
        )


def _run_folder(
    folder: Path, limits: Mapping[str, float], failures: list[str], notes: dict[str, Any]
) -> None:
    """Room in it, and whether bytes that are written to it stay."""
    probe = folder / "selfcheck" / f".probe-{uuid.uuid4().hex}"
    data = os.urandom(PROBE_BYTES)
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with probe.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        notes["run_folder_write_s"] = round(time.monotonic() - start, 4)
        if probe.read_bytes() != data:
            failures.append(f"{folder} gives other bytes back than were written: replace the disk")
    except OSError as error:
        failures.append(f"{folder} cannot be written ({error.strerror}): mount it, or make room")
        return
    finally:
        with suppress(OSError):
            probe.unlink()
    _space(folder, limits["least_run_folder_free_bytes"], failures, notes, "run_folder")


def _kernel(root: Path, failures: list[str], notes: dict[str, Any]) -> None:
    try:
        records = read_records(root / "dev/kmsg")
    except OSError as error:
        notes["kernel_log"] = f"not readable ({error.strerror})"
        return
    matches = match_records(records, seconds_since_boot())
    failures += [
        f"the kernel said {match.count} times within an hour ({match.rule}): {match.line}"
        for match in matches
        if match.fatal
    ]
    notes["kernel_log"] = {m.rule: {"count": m.count, "line": m.line} for m in matches}
