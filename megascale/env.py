"""The only reader of environment variables in the package.

Which rank this process is comes from torchrun's variables (`megascale train --nproc` sets the same)
or from those of an srun step; without either it is the only rank. torchrun's win, because
`srun torchrun` is usual and there srun's name the node. A partial or contradicting set is refused:
a rank that guesses its number makes every other rank wait for one that never comes.

Every function takes the variables as a mapping, so that nothing here has to be patched in tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megascale.errors import LaunchError

# NVLink multicast stays off in every process; children inherit these through `child_environment`.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

FAULT_ORDERS = "MEGASCALE_FAULT"  # file of faults for a trainer, for tests: see `train/faults.py`
SELFCHECK_FAULT = "MEGASCALE_SELFCHECK_FAULT"  # for tests: see `selfcheck_faults`
MEMORY_SLOTS = "MEGASCALE_MEMORY_SLOTS"
RESUME = "MEGASCALE_RESUME"
START = "MEGASCALE_START"  # see `RankEnvironment.start`
TOKEN_FILE = "MEGASCALE_TOKEN_FILE"  # of a driver, for who asks it; a path, so no secret is here
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID")
_PORTS = range(20_000, 30_000)  # below the ephemeral range, from which the kernel serves others


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is among the ranks of its job, and where they meet.

    start  one word for all ranks, another one each time that they are started; None: the launcher
           gives none. A meeting place that outlives a start tells them apart by it.
    """

    global_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: Literal["none", "torchrun", "srun"] = "none"
    start: str | None = None

    def __post_init__(self) -> None:
        got = f"rank {self.global_rank} of {self.world_size}"
        if not 0 <= self.global_rank < self.world_size:
            raise LaunchError(f"{got}; ranks go from 0 to world size - 1 ({self.launcher})")
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise LaunchError(
                f"{got} is local rank {self.local_rank} of {self.local_world_size}; local ranks go "
                f"from 0 to local world size - 1, at most the world size ({self.launcher})"
            )
        if (self.master_addr is None) != (self.master_port is None):
            raise LaunchError(
                f"MASTER_ADDR is {self.master_addr} and MASTER_PORT is {self.master_port}; "
                "set both or neither"
            )

    @property
    def rendezvous(self) -> tuple[str, int]:
        """(host, port) of the store. LaunchError where the launcher gave none."""
        if self.master_addr is None or self.master_port is None:
            raise LaunchError(
                f"rank {self.global_rank} of {self.world_size} knows no meeting place; "
                "set MASTER_ADDR and MASTER_PORT, or start with megascale train --nproc"
            )
        return self.master_addr, self.master_port


@dataclass(frozen=True)
class AgentEnvironment:
    """What a cluster agent hands to the trainers that it starts, as MEGASCALE_* variables."""

    progress_page: str | None = None  # MEGASCALE_PROGRESS_PAGE: 64 bytes, events/page.py
    epoch: int = 0  # MEGASCALE_EPOCH: incarnation of the job; fences what an old one still writes
    fault_orders: str | None = None  # MEGASCALE_FAULT: for tests; unset, nothing looks for faults
    memory_slots: str | None = None  # MEGASCALE_MEMORY_SLOTS: how the paths of the slots begin
    from_disk: bool = False  # MEGASCALE_RESUME=disk: what memory holds was given up by the driver


def rank_environment(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """The rank that a launcher made of this process; a world of one without a launcher.

    Raises LaunchError for a set of variables that is incomplete, not a number, or contradicts.
    """
    env = os.environ if variables is None else variables
    on_srun = "SLURM_STEP_ID" in env  # absent in a batch script, where SLURM_PROCID is 0 as well
    if "RANK" in env or "LOCAL_RANK" in env or ("WORLD_SIZE" in env and not on_srun):
        return _from_torchrun(env)
    if on_srun:
        return _from_srun(env)
    return RankEnvironment()


def _from_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    _require(env, _TORCHRUN, "torchrun")
    global_rank, world_size, local_rank = (_integer(env, name) for name in _TORCHRUN)
    if "LOCAL_WORLD_SIZE" in env:
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE")
    elif local_rank == global_rank:
        local_world_size = world_size  # one node
    else:
        raise LaunchError(
            f"RANK {global_rank} is LOCAL_RANK {local_rank}, so there are several nodes; "
            "set LOCAL_WORLD_SIZE to the ranks of this node"
        )
    return RankEnvironment(
        global_rank=global_rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=env.get("MASTER_ADDR"),
        master_port=_integer(env, "MASTER_PORT") if "MASTER_PORT" in env else None,
        launcher="torchrun",
        start=env.get(START) or _torchrun_start(env),
    )


def _torchrun_start(env: Mapping[str, str]) -> str | None:
    """torchrun names a job by its --rdzv-id ("none" where it has a fixed place), and counts."""
    job = env.get("TORCHELASTIC_RUN_ID", "none")
    return None if job == "none" else f"{job}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _from_srun(env: Mapping[str, str]) -> RankEnvironment:
    # The step's own values come first: in an interactive step the others are the allocation's.
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_NODELIST"
    _require(env, (*_SRUN, tasks, nodes), "srun")
    world_size = _integer(env, tasks)
    if world_size == 1:
        return RankEnvironment()  # a shell in a step (srun --pty) is none of several ranks either
    if "WORLD_SIZE" in env and _integer(env, "WORLD_SIZE") != world_size:
        raise LaunchError(
            f"WORLD_SIZE is {env['WORLD_SIZE']}, but srun started {world_size} tasks; "
            "unset WORLD_SIZE or start as many tasks"
        )
    local_rank = _integer(env, "SLURM_LOCALID")
    return RankEnvironment(
        global_rank=_integer(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_srun_local_world_size(env, world_size),
        master_addr=env.get("MASTER_ADDR") or first_slurm_node(env[nodes]),
        master_port=_integer(env, "MASTER_PORT") if "MASTER_PORT" in env else _srun_port(env),
        launcher="srun",
        start=env.get(START) or _srun_start(env),
    )


def _srun_start(env: Mapping[str, str]) -> str | None:
    if "SLURM_JOB_ID" not in env:
        return None
    requeued = env.get("SLURM_RESTART_COUNT", "0")
    return f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{requeued}"


def _srun_local_world_size(env: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node, from a list such as `4(x2),3` with a count for each node."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in env and "SLURM_TASKS_PER_NODE" in env:
        name = "SLURM_TASKS_PER_NODE"
    _require(env, (name, "SLURM_NODEID"), "srun")
    counts: list[int] = []
    for part in env[name].split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise LaunchError(f"{name} is {env[name]!r}; expected a list such as '4(x2),3'")
        counts += [int(found[1])] * int(found[2] or 1)
    node = _integer(env, "SLURM_NODEID")
    if node >= len(counts) or sum(counts) != world_size:
        raise LaunchError(
            f"{name} {env[name]!r} does not describe {world_size} tasks with this one on node "
            f"{node}; start the program with srun"
        )
    return counts[node]


def first_slurm_node(nodelist: str) -> str:
    """First host of a Slurm node list: 'gpu[003-007,9],cpu1' -> 'gpu003'."""
    found = re.match(r"([^,\[\s]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    if not found:
        raise LaunchError(f"Slurm's node list {nodelist!r} names no node; set MASTER_ADDR")
    return found[1] + (found[2] or "") + (found[3] or "")


@dataclass(frozen=True)
class NodeEnvironment:
    """Where this process is among the machines of its job.

    name       of this machine, as Slurm has it, else its host name
    job_nodes  Slurm's list of the step's machines, as it is written; None where nobody says
    free_rank_zero  torchrun's agent holds the store, so that rank 0 may be anywhere
    """

    name: str
    job_nodes: str | None = None
    free_rank_zero: bool = False


def node_environment(variables: Mapping[str, str] | None = None) -> NodeEnvironment:
    """The machine that a launcher started this process on."""
    env = os.environ if variables is None else variables
    on_srun = "SLURM_STEP_ID" in env
    return NodeEnvironment(
        name=(env.get("SLURMD_NODENAME") if on_srun else None) or hostname(),
        job_nodes=env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST")) if on_srun else None,
        free_rank_zero=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _srun_port(env: Mapping[str, str]) -> int:
    """A port that all tasks of a step, and few other steps, compute."""
    _require(env, ("SLURM_JOB_ID", "SLURM_STEP_ID"), "srun")
    job, step = _integer(env, "SLURM_JOB_ID"), _integer(env, "SLURM_STEP_ID")
    return _PORTS[(31 * job + step) % len(_PORTS)]


def free_port() -> int:
    """A port that nobody listens on, outside the range from which the kernel serves others."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise LaunchError(
        f"none of the ports {_PORTS.start} to {_PORTS.stop - 1} on 127.0.0.1 can be used; end what "
        "listens on them"
    )


def agent_environment(variables: Mapping[str, str] | None = None) -> AgentEnvironment:
    """The MEGASCALE_* variables. LaunchError for one that is not known or not a number."""
    env = os.environ if variables is None else variables
    names = ("MEGASCALE_PROGRESS_PAGE", FAULT_ORDERS, MEMORY_SLOTS)
    known = {*names, "MEGASCALE_EPOCH", RESUME, SELFCHECK_FAULT, START, TOKEN_FILE}
    unknown = sorted(name for name in env if name.startswith("MEGASCALE_") and name not in known)
    if unknown:
        raise LaunchError(f"unknown variable {unknown[0]}; known: {', '.join(sorted(known))}")
    epoch = _integer(env, "MEGASCALE_EPOCH") if "MEGASCALE_EPOCH" in env else 0
    page, fault_orders, memory_slots = (env.get(name) for name in names)
    return AgentEnvironment(page, epoch, fault_orders, memory_slots, env.get(RESUME) == "disk")


def driver_token_file(variables: Mapping[str, str] | None = None) -> Path | None:
    """MEGASCALE_TOKEN_FILE: where the token of a driver lies that is asked by its address."""
    env = os.environ if variables is None else variables
    return Path(env[TOKEN_FILE]) if env.get(TOKEN_FILE) else None


def selfcheck_faults(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """MEGASCALE_SELFCHECK_FAULT, a list such as "gemm:0.5,hang:replay": check name to its fault.

    CHECK ("fail"), CHECK:0.5 (what it measures is multiplied), CHECK:flip (of a bit), hang:CHECK,
    crash:CHECK; docs/selfcheck.md has a table. LaunchError for anything else.
    """
    env = os.environ if variables is None else variables
    faults = {}
    for entry in filter(None, (part.strip() for part in env.get(SELFCHECK_FAULT, "").split(","))):
        found = re.fullmatch(r"(hang|crash):([a-z_]+)|([a-z_]+)(?::(flip|\d+(?:\.\d+)?))?", entry)
        if not found:
            raise LaunchError(
                f"{SELFCHECK_FAULT} has {entry!r}; expected CHECK, CHECK:FACTOR, CHECK:flip, "
                "hang:CHECK or crash:CHECK, separated by commas"
            )
        faults[found[2] or found[3]] = found[1] or found[4] or "fail"
    return faults


def switch_multicast_off(variables: MutableMapping[str, str] | None = None) -> None:
    """Switch NVLink multicast off in NCCL, torch and NVSHMEM, for this process and its children:
    before the first use of a CUDA device, the libraries look once."""
    env = os.environ if variables is None else variables
    env.update(MULTICAST_OFF)


def connect_gloo_lazily() -> None:
    """Let torch's gloo groups that are made from now on connect two ranks when they first need it.
    What the user says stays."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def multicast_is_off(variables: Mapping[str, str] | None = None) -> bool:
    """NVLink multicast is switched off in all libraries that could use it."""
    env = os.environ if variables is None else variables
    return all(env.get(name) == value for name, value in MULTICAST_OFF.items())


def child_environment(
    changes: Mapping[str, str], variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables for a process that this one starts: its own, multicast off, then `changes`."""
    env = os.environ if variables is None else variables
    return {**env, **MULTICAST_OFF, **changes}


def first_visible_gpu(variables: Mapping[str, str] = os.environ) -> str:
    """What the driver calls the first GPU that CUDA shows this process: a number or a UUID."""
    return variables.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def become(variables: Mapping[str, str]) -> None:
    """Let this process have `variables` beside its own: a waiting one that is made a rank."""
    os.environ.update(variables)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Processes that start inside have it; afterwards it is what it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def hostname() -> str:
    return socket.gethostname()


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those `packages` that are installed; the others are absent."""
    versions = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _require(env: Mapping[str, str], names: Iterable[str], launcher: str) -> None:
    names = tuple(names)
    missing = [name for name in names if name not in env]
    if missing:
        there = [name for name in names if name in env]
        raise LaunchError(
            f"{launcher}'s variables are incomplete: {', '.join(missing)} not set"
            + (f" beside {', '.join(there)}" if there else "")
            + f"; set all of {', '.join(names)} or none"
        )


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise LaunchError(f"{name} is {env[name]!r}; it must be a whole number") from None


def gpus_are_chosen() -> bool:
    """Whether CUDA_VISIBLE_DEVICES gives this process a part of the node's GPUs."""
    return "CUDA_VISIBLE_DEVICES" in os.environ


def launches_block() -> bool:
    """Whether CUDA keeps the host in every launch until its kernel has ended."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
