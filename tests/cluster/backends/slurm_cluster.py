"""A real Slurm of six nodes on this machine: munged, slurmctld and six slurmd in the foreground.

On free ports of the loopback, in a folder of its own. Each daemon is a child of the test process
and dies with it; nothing else is touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megascale.cluster.backends.base import Machine
from megascale.env import free_port
from tests.cluster.backends.harness import Harness, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
NODES = [f"n{i}" for i in range(1, 7)]
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=2
TCPTimeout=1
MessageTimeout=2
KillWait=1
TopologyPlugin=topology/tree
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
{nodes}
PartitionName=debug Nodes=n[1-6] Default=YES MaxTime=INFINITE State=UP
"""
TOPOLOGY = """
SwitchName=leaf0 Nodes=n[1-3]
SwitchName=leaf1 Nodes=n[4-6]
SwitchName=spine Switches=leaf[0-1]
"""


def why_not() -> str:
    """Why there can be no Slurm here; "" if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed; run .ci/setup"
    return "" if os.geteuid() == 0 else "a Slurm for tests needs root, to run munged as its user"


class Cluster:
    """The daemons. `conf` is for SLURM_CONF."""

    def __init__(self, folder: Path) -> None:
        self.conf = folder / "slurm.conf"
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("munge", "state"):
            (self._folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2"
            for node in NODES
        )
        text = CONF.format(host=host, port=free_port(), folder=self._folder, nodes=nodes)
        self.conf.write_text(text, encoding="utf-8")
        self.conf.with_name("topology.conf").write_text(TOPOLOGY, encoding="utf-8")
        key = self._folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        for path in (key.parent, key):
            shutil.chown(path, "munge")
        munge = [f"--{what}-file={key.parent}/{what}" for what in ("key", "pid", "log", "seed")]
        munged = ["munged", "--foreground", f"--socket={key.parent}/socket", *munge]
        self._run("munged", *("setpriv", "--reuid=munge", "--clear-groups"), *munged)
        wait_until((key.parent / "socket").exists, "munged")
        self._run("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        for node in NODES:
            self.start_slurmd(node)
        wait_until(lambda: self.ask("sinfo", "-hNo", "%T").split() == ["idle"] * 6, "six nodes")

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command,
            env={**os.environ, "SLURM_CONF": str(self.conf)},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        ).stdout

    def start_slurmd(self, node: str) -> None:
        self._run(node, "slurmd", "-D", "-f", str(self.conf), "-N", node)

    def kill_slurmd(self, node: str) -> None:
        self._daemons[node].kill()
        self._daemons[node].wait()

    def tidy(self) -> None:
        """As new: no job, every slurmd there, every node idle."""
        self.ask("scancel", *self.ask("squeue", "-ho", "%A").split())
        for node in NODES:
            if self._daemons[node].poll() is not None:
                self.start_slurmd(node)
        wait_until(lambda: not self.ask("squeue", "-ho", "%A").split(), "an empty queue")
        states = dict(line.split() for line in self.ask("sinfo", "-hNo", "%N %T").splitlines())
        for node, state in states.items():
            if "drain" in state or "down" in state:
                self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        wait_until(lambda: self.ask("sinfo", "-hNo", "%T").split() == ["idle"] * 6, "idle nodes")

    def end(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()

    def _run(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.out").open("wb") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command], stdout=out, stderr=subprocess.STDOUT
            )


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Not below pytest's own folder, which the user of munged may not enter."""
    folder = Path(tempfile.mkdtemp(prefix="megascale-slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder)


class SlurmHarness(Harness):
    name = "slurm"

    def __init__(self, run_dir: Path, cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
        super().__init__(run_dir, {"gpus": False, "allocate_s": 20.0, "kill_deadline_s": 15.0})
        patch.setenv("SLURM_CONF", str(cluster.conf))
        self.cluster = cluster

    def kill(self, machine: Machine) -> None:
        """The child too: the tests' Slurm has no cgroups, and loses what a dead parent leaves."""
        said = self.said(machine.name)
        for pid in (said["child"], said["pid"]):
            os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        return self.cluster.ask("squeue", "-ho", "%A %j").splitlines()

    def end(self) -> None:
        self.cluster.tidy()
        super().end()
