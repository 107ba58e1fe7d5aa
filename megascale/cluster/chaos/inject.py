"""Injectors: each does one fault to a live job and says when, on whom, and how it is undone."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megascale.cluster.agent.proc import send
from megascale.cluster.backends.namespaces import Namespaces, gateway
from megascale.cluster.chaos.cgroups import Group
from megascale.cluster.chaos.live import LiveJob
from megascale.errors import LaunchError

WAIT_S = 60.0  # for a checkpoint, a start of an epoch, a second driver's answer
LOOK_S = 0.005
GROUP_SEEN_S = (
    3.0  # until the agent knows the rank's cgroup, which elsewhere is there from the start
)


@dataclass
class Hit:
    """What was done. at_s: monotonic, right before it; of an order, the moment of the order.

    order  number of the order that trainers obey: they write down the moment themselves
    said   what the injector saw itself, for faults that the job answers and does not decide about
    """

    at_s: float
    rank: int | None = None
    node: str | None = None
    order: str | None = None
    said: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Of one planned fault: a global rank or a node rank, and the fault's options."""

    rank: int | None = None
    node: int | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    seed: str = "0"


Injector = Callable[[LiveJob, Target], Hit]


def _rank(target: Target) -> int:
    assert target.rank is not None, target
    return target.rank


def _hit(job: LiveJob, rank: int, at_s: float | None = None, **more: Any) -> Hit:
    at_s = time.monotonic() if at_s is None else at_s
    return Hit(at_s, rank, job.node_of(rank // job.spec.procs_per_node), **more)


# ---------------------------------------------------------------- ranks


def rank_signal(signum: int) -> Injector:
    """From outside."""

    def inject(job: LiveJob, target: Target) -> Hit:
        hit = _hit(job, _rank(target))
        process = job.rank(_rank(target))
        hit.at_s = time.monotonic()
        send(process.identity, signum)
        return hit

    return inject


def ordered(kind: str, *, everywhere: bool = False, ahead: int = 0, times: int = 1) -> Injector:
    """From inside. `ahead`: at a step so far ahead that every rank has read the order before it."""

    def inject(job: LiveJob, target: Target) -> Hit:
        rank = target.rank or 0
        hit = _hit(job, rank)
        ranks = range(job.spec.nodes * job.spec.procs_per_node) if everywhere else [rank]
        more: dict[str, Any] = dict(target.options)
        if ahead:
            steps = [now.step for now in job.ranks().values() if now.step is not None]
            more["step"] = max(steps, default=0) + ahead
        hit.at_s = time.monotonic()
        hit.order = job.order(kind, list(ranks), times=times, **more)
        return hit

    return inject


def oom_kill(job: LiveJob, target: Target) -> Hit:
    """The rank's cgroup has a limit, and the rank touches twice as much."""
    hit = _hit(job, _rank(target))
    process = job.rank(_rank(target))
    group = Group("memory", f"oom-{process.identity[0]}")
    job.undo.append(group.remove)
    limit = int(target.options["megabytes"]) << 20
    group.limit_memory(limit)
    group.take([process.identity[0]])
    time.sleep(GROUP_SEEN_S)
    hit.at_s = time.monotonic()
    hit.order = job.order("touch", [_rank(target)], megabytes=target.options["megabytes"] * 2)
    return hit


def freeze_rank(job: LiveJob, target: Target) -> Hit:
    """It cannot be killed until the job's end, or until `thaw_s` have passed."""
    hit = _hit(job, _rank(target))
    process = job.rank(_rank(target))
    group = Group("freezer", f"rank-{process.identity[0]}")
    job.undo.append(group.remove)
    group.take([process.identity[0]])
    hit.at_s = time.monotonic()
    group.freeze()
    return hit


def corrupt_checkpoint(job: LiveJob, target: Target) -> Hit:
    """Bytes of the newest checkpoint are turned over, right after its commit; then a rank dies."""
    folder = job.spec.folder / "checkpoints"
    before = set(folder.glob("step-*/COMMITTED"))
    committed = await_for(lambda: set(folder.glob("step-*/COMMITTED")) - before, "a checkpoint")
    newest = max(mark.parent for mark in committed)
    shards = sorted(newest.glob("rank-*.safetensors"))
    shard = shards[random.Random(target.seed).randrange(len(shards))]
    with shard.open("r+b") as file:
        middle = shard.stat().st_size // 2
        file.seek(middle)
        data = file.read(64)
        file.seek(middle)
        file.write(bytes(byte ^ 0xFF for byte in data))
    hit = rank_signal(signal.SIGKILL)(job, target)
    hit.said["corrupt"] = int(newest.name.removeprefix("step-"))
    return hit


def kill_while_starting(job: LiveJob, target: Target) -> Hit:
    """A rank dies, and another one while the next epoch starts."""
    epoch = job.rank(_rank(target)).epoch
    hit = rank_signal(signal.SIGKILL)(job, target)

    def newer() -> bool:
        return any(now.epoch > epoch for now in job.ranks().values())

    await_for(newer, "the next epoch's ranks")
    other = next(now for now in job.ranks().values() if now.epoch > epoch)
    hit.said["killed while starting"] = other.rank
    send(other.identity, signal.SIGKILL)
    return hit


# ---------------------------------------------------------------- nodes


def agent_kill(job: LiveJob, target: Target) -> Hit:
    node = job.node_of(target.node or 0)
    hit = Hit(time.monotonic(), node=node)
    send(job.agent(node), signal.SIGKILL)
    return hit


def node_gone(job: LiveJob, target: Target) -> Hit:
    node = job.node_of(target.node or 0)
    hit = Hit(time.monotonic(), node=node)
    job.lose_power(node)
    return hit


def node_lost(job: LiveJob, target: Target) -> Hit:
    """It stands still: every process of it, agent included, is stopped."""
    node = job.node_of(target.node or 0)
    pids = job.members()[node]
    hit = Hit(time.monotonic(), node=node)
    for identity in [job.agent(node), *pids.items()]:
        send(identity, signal.SIGSTOP)
    return hit


def unplug(job: LiveJob, target: Target) -> Hit:
    """The node's link goes down, and up again after `seconds` (0: never)."""
    assert job.spec.subnet is not None, "planned into a job with namespaces"
    node = job.node_of(target.node or 0)
    net = Namespaces(job.spec.subnet, f"http://{gateway(job.spec.subnet)}:1")
    index = int(job.host(node).removeprefix("node"))
    hit = Hit(time.monotonic(), node=node)
    net.cut(index, down=True)
    seconds = float(target.options["seconds"])
    if seconds:
        time.sleep(seconds)
        net.cut(index, down=False)
    return hit


# ---------------------------------------------------------------- devices, links, kernel


def devices(**changes: Any) -> Injector:
    def inject(job: LiveJob, target: Target) -> Hit:
        node = job.node_of(target.node or 0)
        hit = Hit(time.monotonic(), node=node)
        job.rig.host(job.host(node)).change_devices(**changes)
        return hit

    return inject


def port(changes: Mapping[str, str], *, times: int = 1) -> Injector:
    """Files of the RDMA port; with `times` the state goes down and up so often."""

    def inject(job: LiveJob, target: Target) -> Hit:
        node = job.node_of(target.node or 0)
        host = job.rig.host(job.host(node))
        hit = Hit(time.monotonic(), node=node)
        for number in range(times):
            for name, text in changes.items():
                host.write_port(name, text)
            if number + 1 < times:
                time.sleep(float(target.options["seconds"]))
                host.write_port("ports/1/state", "4: ACTIVE")
                time.sleep(float(target.options["seconds"]))
        return hit

    return inject


def kernel_line(line: str) -> Injector:
    def inject(job: LiveJob, target: Target) -> Hit:
        node = job.node_of(target.node or 0)
        hit = Hit(time.monotonic(), node=node)
        job.rig.host(job.host(node)).log(line)
        return hit

    return inject


def clock(job: LiveJob, target: Target) -> Hit:
    """The wall clocks of a node, agent and ranks, are put forward (or back)."""
    node = job.node_of(target.node or 0)
    seconds, procs = float(target.options["seconds"]), job.spec.procs_per_node
    hit = Hit(time.monotonic(), node=node)
    job.rig.host(job.host(node)).clock.write_text(str(seconds))
    first = (target.node or 0) * procs
    job.order("clock", list(range(first, first + procs)), seconds=seconds)
    return hit


def await_for(look: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with suppress(LaunchError, FileNotFoundError, KeyError):
            found = look()
            if found:
                return found
        time.sleep(LOOK_S)
    raise LaunchError(f"{what} did not come within {WAIT_S:.0f} s")
