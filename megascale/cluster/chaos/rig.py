"""What agents of a job under test see in place of GPUs, RDMA ports and the kernel's log.

    RUN/chaos/orders.json           faults for the trainers (`train/faults.py`)
    RUN/chaos/pace.json             how long each computes in each step (`train/pace.py`)
    RUN/chaos/next_agent.json       {"selfcheck_fault": "gemm"}: taken by the next agent that starts
    RUN/chaos/hosts/HOST/
        devices.json                in place of NVML (`agent/device_child.py`)
        sys/class/infiniband/...    a replayed port; sys/fs is the machine's own, and in a
                                    namespace sys/class/net too
        kmsg                        in place of /dev/kmsg
        clock_s                     how far the agent's wall clock is put forward

Files are a host's, not a node's: a host that comes back is as sick as it went. The agent makes them
when it starts (`chaos/agent.py`), healthy, where they are not there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.cluster.chaos.noise import paces

NUM_GPUS = 2
PORT = "mlx5_0/1"
_GPU = {
    "temperature_c": 41.0,
    "power_w": 120.0,
    "sm_clock_mhz": 1980.0,
    "throttle": 0,
    "ecc_uncorrected": 0,
    "memory_used_bytes": 1 << 30,
}
_PORT_FILES = {
    "ports/1/state": "4: ACTIVE",
    "ports/1/phys_state": "5: LinkUp",
    "ports/1/rate": "400 Gb/sec (4X NDR)",
    "ports/1/link_layer": "Ethernet",
    "ports/1/counters/link_downed": "0",
    "ports/1/counters/port_rcv_data": "1000000",
    "ports/1/counters/port_xmit_data": "1000000",
    "ports/1/hw_counters/out_of_sequence": "0",
    "ports/1/hw_counters/np_ecn_marked_roce_packets": "0",
    "tc/1/traffic_class": "106",
    "fw_ver": "28.39.1002",
}


@dataclass(frozen=True)
class Host:
    """Files of one host."""

    folder: Path

    @property
    def devices(self) -> Path:
        return self.folder / "devices.json"

    @property
    def sys(self) -> Path:
        return self.folder / "sys"

    @property
    def kernel_log(self) -> Path:
        return self.folder / "kmsg"

    @property
    def clock(self) -> Path:
        return self.folder / "clock_s"

    def make(self, *, own_network: bool = False) -> None:
        """Healthy, unless something is there already.

        own_network  the agent is in a namespace, so that sysfs shows the links that ranks use;
                     elsewhere they use loopback, and the machine's links carry what they like
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.devices.exists():
            names = [f"{self.folder.name} GPU {index}" for index in range(NUM_GPUS)]
            devices = [{"name": name, "uuid": name.replace(" ", "-"), **_GPU} for name in names]
            _replace(self.devices, json.dumps({"devices": devices, "xids": [], "hang": []}))
        (self.sys / "class").mkdir(parents=True, exist_ok=True)
        for name in ("class/net", "fs") if own_network else ("fs",):
            if not (self.sys / name).is_symlink():
                (self.sys / name).symlink_to(f"/sys/{name}")
        for name, text in _PORT_FILES.items():
            file = self.sys / "class" / "infiniband" / "mlx5_0" / name
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n")
        self.kernel_log.touch()

    def change_devices(self, **changes: Any) -> None:
        """Top-level keys of `devices.json`; `ecc=N` sets the first GPU's uncorrected errors."""
        content = json.loads(self.devices.read_text())
        ecc = changes.pop("ecc", None)
        if ecc is not None:
            content["devices"][0]["ecc_uncorrected"] = ecc
        _replace(self.devices, json.dumps({**content, **changes}))

    def write_port(self, name: str, text: str) -> None:
        """A file of the port's device; raises KeyError for one that it does not have."""
        assert name in _PORT_FILES, name
        _replace(self.sys / "class" / "infiniband" / "mlx5_0" / name, text + "\n")

    def log(self, line: str) -> None:
        """A line of the kernel."""
        with self.kernel_log.open("a") as file:
            file.write(f"3,1,1,-;{line}\n")


@dataclass(frozen=True)
class Rig:
    """Of one run folder."""

    run_dir: Path

    @property
    def folder(self) -> Path:
        return self.run_dir / "chaos"

    @property
    def orders(self) -> Path:
        return self.folder / "orders.json"

    def set_pace(self, hosts: int, ranks_per_host: int, step_s: float, seed: int) -> None:
        """Every rank's computation of a step takes about `step_s`, by the noise model."""
        table = paces(hosts, ranks_per_host, step_s, seed)
        (self.folder / "pace.json").write_text(json.dumps(table))

    @property
    def next_agent(self) -> Path:
        return self.folder / "next_agent.json"

    def host(self, name: str) -> Host:
        return Host(self.folder / "hosts" / name)

    def take_next(self, host: str) -> dict[str, str]:
        """What the agent that starts now on `host` shall have; for one agent only."""
        taken = self.host(host).folder / "taken.json"
        try:
            self.next_agent.rename(taken)
        except FileNotFoundError:
            return {}
        found: dict[str, str] = json.loads(taken.read_text())
        return found


def _replace(file: Path, text: str) -> None:
    new = file.with_name(file.name + ".new")
    new.write_text(text)
    new.replace(file)
