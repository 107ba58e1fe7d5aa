"""Run the driver and the agents, print the table, append the rows.

heartbeat, p99        of all heartbeats of the steady state, ms, from the moment each was due
incident decided      from the first heartbeat that can tell of the fault (all ranks of all nodes
                      fail at once) until every node has its command to stop, s
driver's core         CPU time of the driver over the wall clock of the steady state
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.control_plane.agents import Agent, Seen, join_all
from megascale.flux.bench.rows import append
from megascale.train.bench.rows import Origin

RESULTS = Path("benchmarks/results/chaos.jsonl")
SETTLE_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.control_plane")
    parser.add_argument("--agents", type=int, default=1536)
    parser.add_argument("--ranks", type=int, default=8, help="of a node")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the steady state")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="megascale-control-plane-") as folder:
        command = [sys.executable, "-m", "benchmarks.control_plane.driver", folder]
        log = Path(folder) / "driver.log"
        with log.open("wb") as errors:
            driver = subprocess.Popen(
                [*command, str(given.agents), str(given.ranks)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            os.sched_setaffinity(driver.pid, cores[:1])
            os.sched_setaffinity(0, cores[1:] or cores)
            assert driver.stdout is not None
            url, token_file = driver.stdout.readline().split()
            host, _, port = url.removeprefix("http://").partition(":")
            token = Path(token_file).read_text().strip()
            found = asyncio.run(_measure(given, driver.pid, (host, int(port), token)))
        finally:
            driver.terminate()
            driver.wait()
            os.sched_setaffinity(0, cores)
            tail = log.read_text(errors="replace").splitlines()[-12:]
            print("\n".join(tail), file=sys.stderr)
    origin = Origin.here(
        num_ranks=1,
        on_gpus=False,
        command=f"python -m benchmarks.control_plane --agents {given.agents} --ranks {given.ranks}"
        f" --seconds {given.seconds:g}",
        given_commit=None,
    )
    for name, (value, metric, target) in found.items():
        met = value <= target
        row = {
            "bench": "chaos",
            "case": {"line": f"control plane: {name}", "over": f"{given.agents} agents"},
            "metric": metric,
            "value": value,
            "target": {"op": "<=", "value": target},
            "met": met,
            **origin.now(),
        }
        append(given.output, row)
        print(f"{name:24} {value:8.3f} {metric:6} <= {target:g}  {'yes' if met else 'NO'}")
    return 0


async def _measure(
    given: argparse.Namespace, driver_pid: int, connect: tuple[str, int, str]
) -> dict[str, tuple[float, str, float]]:
    """Name -> value, metric, target."""
    seen = Seen()
    agents = [Agent(i, given.ranks, seen, connect) for i in range(given.agents)]
    began_s = time.monotonic()
    await join_all(agents)
    print(f"{given.agents} agents joined in {time.monotonic() - began_s:.1f} s", file=sys.stderr)
    tasks = [asyncio.create_task(agent.obey()) for agent in agents]
    tasks += [
        asyncio.create_task(agent.beat(number / given.agents))
        for number, agent in enumerate(agents)
    ]
    while len(seen.started_s) < given.agents:
        await asyncio.sleep(0.1)
        assert time.monotonic() - began_s < 120, f"{len(seen.started_s)} nodes were started"
    print(f"all started after {time.monotonic() - began_s:.1f} s", file=sys.stderr)
    await asyncio.sleep(SETTLE_S)
    seen.latencies_s.clear()
    cpu_s, start_s = _cpu_s(driver_pid), time.monotonic()
    await asyncio.sleep(given.seconds)
    core = (_cpu_s(driver_pid) - cpu_s) / (time.monotonic() - start_s)
    latencies = sorted(seen.latencies_s)
    expected = given.agents * given.seconds
    assert not seen.failures, seen.failures[:3]
    assert len(latencies) > 0.95 * expected, f"{len(latencies)} of {expected:.0f} heartbeats"
    assert not seen.stopped_s, "the driver stopped a job that was well"
    for agent in agents:
        agent.fail.set()
    fault_s = time.monotonic()
    while len(seen.stopped_s) < given.agents:
        await asyncio.sleep(0.02)
        assert time.monotonic() - fault_s < 60, f"{len(seen.stopped_s)} nodes were stopped"
    decided_s = max(seen.stopped_s) - fault_s
    for task in tasks:
        task.cancel()
    for agent in agents:
        agent.close()
    print(
        f"heartbeats: median {1e3 * statistics.median(latencies):.1f} ms, worst "
        f"{1e3 * latencies[-1]:.1f} ms, {len(latencies)} of them",
        file=sys.stderr,
    )
    return {
        "heartbeat, p99": (1e3 * latencies[int(0.99 * len(latencies))], "ms", 100.0),
        "incident decided": (decided_s, "s", 2.0),
        "driver's core": (core, "share", 1.0),
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
