"""Run the driver and the agents, print the table, append the rows.

heartbeat, p99        of all heartbeats of the steady state, ms, from the moment each was due
CPU of a heartbeat    of the driver, all its threads, over the heartbeats of the steady state, us;
                      the target is two fifths of a core
driver's core         CPU time of the driver over the wall clock of the steady state
incident decided      from the moment in which all ranks of all nodes lose their peers until every
                      node has its command to stop, s; the heartbeats come all at once
log storm             one rank fails, and in the same moment all others, with messages as long as
                      they may be and a line of the log each. Is the first error the one that the
                      job's journal keeps, when had every node its command to stop, and how much
                      larger is the driver's memory half a minute later, MB
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.arguments import writable_file
from benchmarks.control_plane.agents import FIRST, Agent, Seen, join_all
from megascale.cluster.chaos.observe import Journal
from megascale.errors import LaunchError
from megascale.flux.bench.rows import append
from megascale.train.bench.rows import Origin

RESULTS = Path("benchmarks/results/chaos.jsonl")
SETTLE_S = 5.0
START_S, END_S = 60.0, 30.0  # of the driver
Found = dict[str, tuple[float, str, str, float]]  # line -> value, metric, target


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.control_plane")
    parser.add_argument("--agents", type=int, default=1536)
    parser.add_argument("--ranks", type=int, default=8, help="of a node")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the steady state")
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    load = round(os.getloadavg()[0], 2)  # of whatever else runs here
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
            url, token_file = _first_line(driver, START_S).split()
            host, _, port = url.removeprefix("http://").partition(":")
            token = Path(token_file).read_text().strip()
            connect = host, int(port), token
            journal = Path(folder) / "driver" / "journal.sqlite"
            found = asyncio.run(_measure(given, driver.pid, connect, journal))
        finally:
            driver.terminate()
            try:
                driver.wait(END_S)
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait(END_S)
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
    for name, (value, metric, op, target) in found.items():
        met = value <= target if op == "<=" else value >= target
        fault = f"{given.agents} agents, {given.agents * given.ranks} ranks"
        row = {
            "bench": "chaos",
            "case": {"line": name, "fault": fault, "schedule": "control-plane"},
            "metric": metric,
            "value": round(value, 4),
            "target": {"op": op, "value": target},
            "met": met,
            "load": load,
            **origin.now(),
        }
        append(given.output, row)
        told = f"{value:9.3f} {metric:6} {op} {target:g}"
        print(f"{name:28} {told}  {'yes' if met else 'NO'}")
    return 0


def _first_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Of its output. Raises LaunchError where it says nothing in time, or ended."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline() if ready else ""
    if not line:
        raise LaunchError(f"the driver ended, or said no address in {timeout_s:.0f} s; see its log")
    return line


async def _measure(
    given: argparse.Namespace, driver_pid: int, connect: tuple[str, int, str], journal: Path
) -> Found:
    gc.disable()  # a thousand agents have a thousand interpreters, none with a pass this long
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
    await _until(lambda: len(seen.started_s), given.agents, "nodes were started", seen)
    await asyncio.sleep(SETTLE_S)
    found = await _steady(given, driver_pid, seen)
    fault_s, cpu_s = time.monotonic(), _cpu_s(driver_pid)
    for agent in agents:
        agent.fail("peer lost")
    await _until(lambda: len(seen.stopped_s), given.agents, "nodes were stopped", seen)
    found["incident decided"] = (max(seen.stopped_s) - fault_s, "s", "<=", 2.0)
    cpu_s = _cpu_s(driver_pid) - cpu_s
    print(f"{cpu_s:.2f} s of the driver until the incident was decided", file=sys.stderr)
    await _until(lambda: len(seen.started_s), 2 * given.agents, "nodes were started again", seen)
    await asyncio.sleep(SETTLE_S)
    found |= await _storm(agents, driver_pid, seen, journal)
    for task in tasks:
        task.cancel()
    for agent in agents:
        agent.close()
    return found


async def _steady(given: argparse.Namespace, driver_pid: int, seen: Seen) -> Found:
    seen.latencies_s.clear()
    cpu_s, start_s = _cpu_s(driver_pid), time.monotonic()
    await asyncio.sleep(given.seconds)
    cpu_s, wall_s = _cpu_s(driver_pid) - cpu_s, time.monotonic() - start_s
    latencies = sorted(seen.latencies_s)
    each_us = 1e6 * cpu_s / max(1, len(latencies))
    print(
        f"{len(latencies)} heartbeats, {len(latencies) / wall_s:.0f} a second: {each_us:.0f} us of "
        f"the driver each, median {1e3 * statistics.median(latencies):.1f} ms, worst "
        f"{1e3 * latencies[-1]:.1f} ms",
        file=sys.stderr,
    )
    if len(latencies) < 0.95 * given.agents * given.seconds:
        print("the agents did not keep up: is the machine busy?", file=sys.stderr)
    assert not seen.failures, seen.failures[:3]
    assert not seen.stopped_s, "the driver stopped a job that was well"
    return {
        "heartbeat, p99": (1e3 * latencies[int(0.99 * len(latencies))], "ms", "<=", 100.0),
        "CPU of a heartbeat": (each_us, "us", "<=", 0.4e6 / given.agents),
        "driver's core": (cpu_s / wall_s, "share", "<=", 1.0),
    }


async def _storm(agents: list[Agent], driver_pid: int, seen: Seen, journal: Path) -> Found:
    num_stopped, before_mb, fault_s = len(seen.stopped_s), _memory_mb(driver_pid), time.monotonic()
    first, *others = agents
    first.fail("first")  # it is the first to be sent; the others follow in the same moment
    for agent in others:
        agent.fail("storm")
    wanted = num_stopped + len(agents)
    await _until(lambda: len(seen.stopped_s), wanted, "nodes were stopped", seen)
    decided_s = max(seen.stopped_s) - fault_s
    most_mb = 0.0
    for _ in range(30):
        await asyncio.sleep(1.0)
        most_mb = max(most_mb, _memory_mb(driver_pid))
    job = Journal(journal)
    job.read()
    assert job.job is not None, journal
    kept = job.job.faults[-1].text == FIRST
    return {
        "log storm, first error kept": (float(kept), "share", ">=", 1.0),
        "log storm decided": (decided_s, "s", "<=", 10.0),
        "log storm, memory": (most_mb - before_mb, "MB", "<=", 256.0),
    }


async def _until(count: Callable[[], int], wanted: int, what: str, seen: Seen) -> None:
    deadline_s = time.monotonic() + 120.0
    while count() < wanted:
        await asyncio.sleep(0.02)
        assert not seen.failures, seen.failures[:3]
        assert time.monotonic() < deadline_s, f"{count()} of {wanted} {what}"


def _memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
