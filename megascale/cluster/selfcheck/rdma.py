"""Bandwidth of the RDMA NICs, by `ib_write_bw` of perftest where it is installed (MegaScale 4.3).

Loopback from every NIC to every memory node and every GPU, and from every NIC to every other one of
the node. One test after another: together they would measure the host's memory. About 0.7 s each.

A near memory node is held to the port's rate; a far one and a GPU to the others of their kind.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale import env
from megascale.cluster.selfcheck.process import POLL_S, Outcome, Worker

PROGRAM = "ib_write_bw"
MESSAGE_BYTES, MESSAGES = 65_536, 20_000
TEST_S = 20.0  # one test, at most
START_S = 0.3  # until its server listens; a client that comes too early is sent again
TRIES = 5
GBIT_PER = {"Gb/sec": 1.0, "MB/sec": 8 * 2**20 / 1e9, "MiB/sec": 8 * 2**20 / 1e9}


@dataclass(frozen=True)
class Port:
    """One port of a NIC that is up. gbit_s: of the line; numa_node: None where not told"""

    device: str
    number: int
    gbit_s: float
    numa_node: int | None


@dataclass(frozen=True)
class BandwidthTest:
    """server writes nothing, client writes into its memory.

    memory_node, gpu  where the server's buffer lies; neither: wherever
    """

    server: Port
    client: Port
    memory_node: int | None = None
    gpu: int | None = None

    @property
    def at(self) -> str:
        if self.gpu is not None:
            return f"{self.client.device} to GPU {self.gpu}"
        if self.memory_node is not None:
            return f"{self.client.device} to node {self.memory_node}"
        return f"{self.client.device} to {self.server.device}"

    @property
    def speed_class(self) -> str:
        if self.gpu is not None:
            return "rdma_gpu_gbit_s"
        if self.memory_node is None:
            return "rdma_nic_gbit_s"
        near = self.client.numa_node in (None, self.memory_node)
        return "rdma_node_gbit_s" if near else "rdma_node_far_gbit_s"

    def commands(self, port: int, numactl: str | None) -> tuple[list[str], list[str]]:
        """argv of the server and of the client."""
        common = ["-p", str(port), "-F", "--report_gbits"]
        common += ["-s", str(MESSAGE_BYTES), "-n", str(MESSAGES)]
        server = [PROGRAM, "-d", self.server.device, "-i", str(self.server.number), *common]
        client = [PROGRAM, "-d", self.client.device, "-i", str(self.client.number), *common]
        if self.gpu is not None:
            server.append(f"--use_cuda={self.gpu}")
        if self.memory_node is not None and numactl:
            node = str(self.memory_node)
            server = [numactl, f"--cpunodebind={node}", f"--membind={node}", *server]
        return server, [*client, "127.0.0.1"]


def read_ports(root: Path = Path("/")) -> list[Port]:
    """Active ports, in order. The rate reads '400 Gb/sec (4X NDR)'."""
    ports = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        try:
            active = "ACTIVE" in (folder / "state").read_text()
            rate = float((folder / "rate").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue
        device = folder.parent.parent
        try:
            node = int((device / "device/numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        if active:
            ports.append(Port(device.name, int(folder.name), rate, node if node >= 0 else None))
    return ports


def plan_tests(ports: Sequence[Port], nodes: Sequence[int], gpus: int) -> list[BandwidthTest]:
    loopback = [BandwidthTest(p, p, memory_node=node) for p in ports for node in nodes]
    to_gpus = [BandwidthTest(p, p, gpu=gpu) for p in ports for gpu in range(gpus)]
    across = [BandwidthTest(a, b) for a in ports for b in ports if a != b]
    return [*loopback, *to_gpus, *across]


def parse_bandwidth(text: str) -> float | None:
    """Average Gb/s of the largest message in perftest's table; None where there is none.

    The heading names the unit: ` #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate...`;
    without --report_gbits MB/sec, which are 2^20 bytes.
    """
    unit: str | None = None
    found: tuple[int, float] | None = None
    for line in text.splitlines():
        if heading := re.search(r"#bytes\s+#iterations.*BW average\[(\S+?)\]", line):
            unit = heading[1]
        row = re.match(r"\s*(\d+)\s+\d+\s+[\d.]+\s+([\d.]+)\s", line + " ")
        if row and unit in GBIT_PER and (found is None or int(row[1]) >= found[0]):
            found = int(row[1]), float(row[2]) * GBIT_PER[unit]
    return None if found is None else found[1]


def measure(tests: Sequence[BandwidthTest], deadline: float) -> Outcome:
    """All of the tests, as rates. Those for which no time was left are named in an error."""
    start = time.monotonic()
    rates: list[dict[str, Any]] = []
    numactl = shutil.which("numactl")
    for number, test in enumerate(tests):
        limit = min(deadline, time.monotonic() + TEST_S)
        if time.monotonic() >= deadline:
            reason = f"no time was left after {number} of {len(tests)} tests, before {test.at}"
            return Outcome(time.monotonic() - start, None, "late", reason)
        gbit_s, why = _one(test, numactl, limit)
        if gbit_s is None:
            return Outcome(time.monotonic() - start, None, "error", f"{test.at}: {why}")
        rate = {"at": test.at, "class": test.speed_class, "value": gbit_s}
        rate["kind"] = f"{test.client.gbit_s:g} Gb/s port"
        if test.speed_class == "rdma_node_gbit_s":
            rate["expected"] = min(test.client.gbit_s, test.server.gbit_s)
        rates.append(rate)
    return Outcome(time.monotonic() - start, {"rates": rates, "unit": "Gb/s"})


def _one(test: BandwidthTest, numactl: str | None, limit: float) -> tuple[float | None, str]:
    """(Gb/s, "") or (None, why not)."""
    server_argv, client_argv = test.commands(env.free_port(), numactl)
    server = Worker(server_argv, {})
    try:
        why = ""
        _run_for(server, min(limit, time.monotonic() + START_S))
        for _ in range(TRIES):
            if time.monotonic() >= limit:
                break
            client = Worker(client_argv, {})
            try:
                running = _run_for(client, limit)
                gbit_s = parse_bandwidth("\n".join(client.lines))
            finally:
                client.end()
            if gbit_s is not None:
                return gbit_s, ""
            why = f"{PROGRAM} took too long" if running else f"{PROGRAM} {client.how_it_ended()}"
            if not server.poll(START_S):
                break
        server.end()
        return None, f"{why or 'no time was left'}; its server {server.how_it_ended()}"
    finally:
        server.end()


def _run_for(worker: Worker, limit: float) -> bool:
    """Until it ends or `limit`; whether it still runs."""
    while running := worker.poll(POLL_S):
        if time.monotonic() >= limit:
            break
    return running
