"""Slurm through its own commands: what is asked, and how the answers are read.

Written against 22.05. Formats are given (`-o`), so that no site's defaults change the answers.
`scancel` ends with 0 also where it did nothing, so nobody believes it: what is cancelled is looked
for in the queue.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megascale.cluster.backends.base import BackendError

COMMAND_S = 30.0
_UNUSABLE = re.compile(r"down|drain|fail|maint|unknown|powered|powering|no_respond|reboot", re.I)


@dataclass(frozen=True)
class Job:
    """A job that Slurm has not finished with. `host`: "" until it is placed."""

    number: str
    state: str
    host: str
    reason: str


@dataclass(frozen=True)
class Node:
    """`state` as in sinfo's long form, with its marks: `idle`, `allocated*`, `drained`, ..."""

    host: str
    state: str
    reason: str

    @property
    def usable(self) -> bool:
        return not _UNUSABLE.search(self.state) and self.answers

    @property
    def answers(self) -> bool:
        return not self.state.endswith("*")

    @property
    def idle(self) -> bool:
        return self.state == "idle"


def check_here() -> None:
    """Raises BackendError where this machine lacks the commands or Slurm's configuration. Nobody
    else is asked: a driver that comes back may find a controller that does not answer."""
    missing = [name for name in ("sbatch", "squeue", "sinfo") if shutil.which(name) is None]
    if missing:
        raise BackendError(
            f"{', '.join(missing)} not found; run the driver where Slurm's commands are on the PATH"
        )
    try:
        _run("squeue", "--version")
    except BackendError as error:
        raise BackendError(
            f"Slurm is not set up on this machine ({error}); run the driver on one of the cluster, "
            "where squeue answers, or use another backend (--backend)"
        ) from None


def jobs(name: str) -> dict[str, Job]:
    """The user's unfinished jobs of this name, by number."""
    lines = _run("squeue", "--noheader", f"--name={name}", "--format=%A|%T|%N|%r").splitlines()
    found = (Job(*line.split("|", 3)) for line in lines if line)
    return {job.number: job for job in found}


def nodes(partition: str) -> dict[str, Node]:
    """Nodes of the partition (""; all), by name."""
    chosen = (f"--partition={partition}",) if partition else ()
    lines = _run("sinfo", "--noheader", "--Node", *chosen, "--format=%N|%T|%E").splitlines()
    found = (Node(*line.split("|", 2)) for line in lines if line)
    return {node.host: node for node in found}


def switches() -> dict[str, str]:
    """The leaf switch of each node; empty where Slurm knows no topology."""
    leaf_of: dict[str, str] = {}
    for line in _run("scontrol", "show", "topology").splitlines():
        found = re.match(r"SwitchName=(\S+) Level=0 .*?Nodes=(\S+)", line)
        if found:
            hosts = _run("scontrol", "show", "hostnames", found[2]).split()
            leaf_of.update(dict.fromkeys(hosts, found[1]))
    return leaf_of


def submit(script: str, arguments: Sequence[str]) -> str:
    """The number of the new job."""
    answer = _run("sbatch", "--parsable", *arguments, script=script)
    return answer.strip().partition(";")[0]


def cancel(numbers: Iterable[str]) -> None:
    """Ask for the end of these jobs; to be looked for in `jobs` afterwards."""
    numbers = sorted(numbers)
    if numbers:
        _run("scancel", "--quiet", *numbers)


def outcome(number: str) -> tuple[str, str]:
    """(state, words) of a job that left the queue; Slurm remembers it for a while."""
    try:
        answer = _run("scontrol", "--oneliner", "show", "job", number)
    except BackendError:
        return "", "Slurm does not know the job any more"
    fields = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", answer))
    state = fields.get("JobState", "")
    words = f"{state}, exit code {fields.get('ExitCode', '?')}, reason {fields.get('Reason', '?')}"
    return state, words


def drain(host: str, reason: str) -> str:
    """Keep everybody's jobs off `host`; Slurm's words where it is not permitted, else ""."""
    try:
        _run("scontrol", "update", f"nodename={host}", "state=drain", f"reason={reason}")
    except BackendError as error:
        return str(error)
    return ""


def _run(*command: str, script: str | None = None) -> str:
    try:
        done = subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except FileNotFoundError:
        raise BackendError(
            f"{command[0]} is not installed here; start the job where Slurm's commands are, or use "
            "another backend"
        ) from None
    except subprocess.TimeoutExpired:
        raise BackendError(f"{command[0]} did not answer within {COMMAND_S:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BackendError(f"{' '.join(command)}: {'; '.join(lines)}")
    return done.stdout
