"""`megascale monitor`: samples the ports of this node, in a child process, into the run's folder.

Of all nodes of a live run: `--everywhere` leaves a request (`telemetry/requests.py`), which the
first rank of each node finds within a second and obeys.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.env import child_environment, hostname
from megascale.errors import ConfigError, DataError, LaunchError
from megascale.telemetry.requests import Request, free_name, write_request
from megascale.telemetry.shown import counted

INTERVAL_MS, SECONDS = 2.0, 10.0
_LEAST_MS, _MOST_MS, _MOST_S = 1.0, 1000.0, 600.0
_WRITE_S = 60.0  # beyond the seconds themselves: starting, and writing what was sampled


@dataclass(frozen=True)
class Monitoring:
    """What is sampled, how often and how long. `ports`: patterns; empty: all but loopback."""

    interval_ms: float = INTERVAL_MS
    seconds: float = SECONDS
    root: Path = Path("/sys")
    ports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _LEAST_MS <= self.interval_ms <= _MOST_MS:
            raise ConfigError(
                f"--interval-ms is {self.interval_ms:g}; legal: {_LEAST_MS:g} to {_MOST_MS:g}"
            )
        if not 0 < self.seconds <= _MOST_S:
            raise ConfigError(f"--seconds is {self.seconds:g}; legal: above 0, at most {_MOST_S:g}")

    @property
    def limit_s(self) -> float:
        return self.seconds + _WRITE_S


def node_file(run_dir: Path, host: str | None = None) -> Path:
    """Where the node itself, not a rank of it, writes its events."""
    return run_dir / "telemetry" / f"node_{host or hostname()}.jsonl"


def start_child(run_dir: Path, what: Monitoring) -> subprocess.Popen[str]:
    """The process that samples this node; its output is a line of JSON."""
    command = [sys.executable, "-m", "megascale.telemetry.monitor"]
    command += ["--file", str(node_file(run_dir)), "--root", str(what.root)]
    command += ["--interval-ms", str(what.interval_ms), "--seconds", str(what.seconds)]
    command += ["--ports", *what.ports] if what.ports else []
    return subprocess.Popen(
        command,
        env=child_environment({}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_child(child: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
    """What the child achieved. LaunchError: it failed, or was not through in `limit_s`."""
    try:
        output, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise LaunchError(
            f"the monitor was not through in {limit_s:.0f} s and was ended; is a file system or "
            "NVML hanging on this node?"
        ) from None
    if child.returncode:
        last = errors.strip().splitlines()[-1:] or ["no word"]
        raise LaunchError(f"the monitor ended with code {child.returncode}: {last[0]}")
    achieved: dict[str, Any] = json.loads(output)
    return achieved


def monitor_run(
    run_dir: Path, what: Monitoring, *, everywhere: bool, say: Callable[[str], object]
) -> None:
    """The verb. DataError: no such run, or this node has no port."""
    if not run_dir.is_dir():
        raise DataError(f"there is no folder {run_dir}; give the folder of a run (job.run_dir)")
    if everywhere:
        name = free_name(run_dir, time.strftime("monitor-%Y%m%d-%H%M%S", time.gmtime()))
        write_request(run_dir, Request(name, "monitor", 1, 1))
        say(
            f"asked the first rank of each node to sample its ports every {INTERVAL_MS:g} ms for "
            f"{SECONDS:g} s; then ask: megascale diagnose {run_dir} network"
        )
        return
    (run_dir / "telemetry").mkdir(exist_ok=True)
    achieved = finish_child(start_child(run_dir, what), what.limit_s)
    if not achieved["num_ports"]:
        raise DataError(
            f"no port with byte counters under {what.root} fits {list(what.ports) or 'all but lo'}"
        )
    for line in told(achieved, node_file(run_dir)):
        say(line)
    say(f"ask: megascale diagnose {run_dir} network")


def told(achieved: dict[str, Any], file: Path) -> Sequence[str]:
    """What was achieved, for a person."""
    how_well = (
        f"every {achieved['median_ms']:.3f} ms (asked {achieved['asked_ms']:g}), 99 of 100 within "
        f"{achieved['p99_ms']:.3f} ms, the longest {achieved['longest_ms']:.3f} ms, "
        f"{counted(achieved['missed'], 'tick')} missed; {100 * achieved['cpu_share']:.1f} % of a "
        "core"
    )
    num_samples = counted(achieved["num_samples"], "sample")
    return [f"{num_samples} of {counted(achieved['num_ports'], 'port')} in {file}", how_well]
