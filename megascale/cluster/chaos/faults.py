"""The table of faults: who injects it, and what must be said and done about it.

A row: how it is done; which causes name it right (the incident's, or the fault's that was judged);
who must be named; what must come of it. `cause` and `names` are what the test compares with, so a
new fault says them before it is tried.

| outcome | means |
|---|---|
| restart | the ranks start again and new steps are done, nobody had to help |
| stop | the job ends with a report, because nothing that could be done would help |
| evict | a node that trains nothing is exchanged; training goes on |
| flap | reported as heard again in time; training goes on |
| alert | reported; training goes on |
| readopt | the next driver has all nodes again; training goes on |
| unmoved | nothing is decided; training goes on |
"""

from __future__ import annotations

import difflib
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megascale.cluster.chaos import cgroups, inject, inject_control, inject_network
from megascale.cluster.chaos.inject import Injector
from megascale.errors import ConfigError

Aims = Literal["rank", "node", "job"]
Outcome = Literal["restart", "stop", "evict", "flap", "alert", "readopt", "unmoved"]


@dataclass(frozen=True)
class Kind:
    """aims     whom the schedule chooses: one rank, one node, or nobody
    names    who must be named: exactly this rank, exactly this node, or nobody
    options  what the schedule may set, with what holds otherwise
    needs    what the machine must have (`missing`)
    values   it changes what is computed until the job goes back: those steps may differ
    alone    it has a job of its own: a second of its cause ends it, or it leaves something behind
    watch_s  how long nothing must happen, of those that leave training alone
    """

    inject: Injector
    aims: Aims
    causes: tuple[str, ...]
    names: Literal["rank", "node", ""]
    outcome: Outcome
    options: Mapping[str, float] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    values: bool = False
    watch_s: float = 5.0
    overrides: tuple[str, ...] = ()
    alone: bool = False


def _died(injector: Injector, *causes: str, **more: float) -> Kind:
    return Kind(injector, "rank", causes, "rank", "restart", options=more)


def _hung(injector: Injector, **more: float) -> Kind:
    return Kind(injector, "rank", ("hang",), "rank", "restart", options=more)


def _node(injector: Injector, *causes: str, needs: tuple[str, ...] = (), **more: float) -> Kind:
    return Kind(injector, "node", causes, "node", "restart", options=more, needs=needs)


_NET = ("root", "namespaces")
KINDS: dict[str, Kind] = {
    # ---- a rank ends
    "kill": _died(inject.rank_signal(signal.SIGKILL), "signal"),
    "segv": _died(inject.ordered("segv"), "signal"),
    "abort": _died(inject.ordered("abort"), "signal"),
    "exit_code": _died(inject.ordered("exit"), "exit", code=17),
    "kill_in_save": _died(inject.ordered("kill_in_save"), "signal", seconds=0.02),
    "corrupt_checkpoint": _died(inject.corrupt_checkpoint, "signal"),
    "kill_while_starting": Kind(inject.kill_while_starting, "rank", ("signal",), "rank", "restart"),
    "exception": Kind(inject.ordered("exception"), "rank", ("exception",), "rank", "stop"),
    "exception_everywhere": Kind(
        inject.ordered("exception", everywhere=True, ahead=40), "job", ("exception",), "", "stop"
    ),
    "same_fault": Kind(
        inject.ordered("segv", ahead=40, times=9), "rank", ("signal",), "rank", "stop"
    ),
    # ---- a rank hangs, or is slow
    "sigstop": _hung(inject.rank_signal(signal.SIGSTOP)),
    "skip_collective": _hung(inject.ordered("skip_collective"), group=0),
    "gil": _hung(inject.ordered("gil")),
    "sleep": _hung(inject.ordered("sleep")),
    "straggler": Kind(
        inject.ordered("slow"),
        "rank",
        ("straggler",),
        "rank",
        "restart",
        options={"seconds": 0.1, "steps": 500, "share": 0.0},
    ),
    # ---- values
    "nan": Kind(
        inject.ordered("nan"),
        "rank",
        ("nonfinite", "numerical"),
        "",
        "restart",
        values=True,
    ),
    "loss_spike": Kind(
        inject.ordered("spike"),
        "rank",
        ("loss_spike",),
        "",
        "restart",
        options={"scale": 64.0, "steps": 6},
        values=True,
        overrides=("cluster.loss_spike=0.3", "checkpoint.keep_latest_k=10"),
    ),
    "bit_flip": Kind(
        inject.ordered("flip"),
        "rank",
        ("replicas_differ",),
        "rank",
        "restart",
        values=True,
        overrides=(  # of two replicas nobody knows which is right: to name it takes three or more
            "debug.check_replicas_interval=1",
            "parallelism.tensor_parallel_size=1",
            "parallelism.pipeline_parallel_size=1",
            "training.micro_batch_size=1",
        ),
    ),
    # ---- resources
    "out_of_memory": _died(inject.ordered("out_of_memory"), "out_of_memory", megabytes=64),
    "oom_kill": Kind(
        inject.oom_kill,
        "rank",
        ("out_of_memory",),
        "rank",
        "restart",
        options={"megabytes": 1024},
        needs=("cgroup memory",),
        alone=True,
    ),
    "disk_full": _died(inject.ordered("disk_full"), "disk_full"),
    "log_storm": Kind(
        inject.ordered("log_storm"), "rank", (), "", "unmoved", options={"lines": 20_000}
    ),
    # ---- nodes
    "agent_kill": _node(inject.agent_kill, "node_gone", "agent_died"),
    "node_gone": _node(inject.node_gone, "node_gone"),
    "node_lost": _node(inject.node_lost, "node_lost"),
    "partition": _node(inject.unplug, "node_lost", needs=_NET, seconds=0.0),
    "unplugged": Kind(
        inject.unplug,
        "node",
        ("silent",),
        "node",
        "flap",
        options={"seconds": 5.0},
        needs=_NET,
    ),
    "unkillable": Kind(
        inject.freeze_rank,
        "rank",
        ("hang", "unkillable"),
        "rank",
        "restart",
        needs=("cgroup freezer",),
        alone=True,
    ),
    "spare_kill": Kind(inject_control.spare_kill, "job", ("node_gone",), "node", "evict"),
    "bad_spare": Kind(inject_control.bad_spare, "job", ("selfcheck",), "node", "evict"),
    # ---- devices, links, kernel
    "xid": _node(inject.devices(xids=[[0, 79]]), "xid"),
    "ecc": _node(inject.devices(ecc=1), "ecc_uncorrected"),
    "gpu_lost": _node(inject.devices(hang=["nvmlDeviceGetTemperature"]), "device_lost"),
    "machine_check": _node(
        inject.kernel_line(
            "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: fatal"
        ),
        "device",
        "machine_check",
    ),
    "nic_down": Kind(
        inject.port({"ports/1/state": "1: DOWN"}), "node", ("nic_mlx5_0/1",), "node", "alert"
    ),
    "link_blip": Kind(
        inject_network.link_blip,
        "node",
        ("link_flap", "nic_mlx5_0/1"),
        "node",
        "alert",
        options={"seconds": 5.0},
        watch_s=10.0,
    ),
    "traffic_stops": Kind(
        inject_network.traffic_stops,
        "node",
        ("traffic_stopped",),
        "node",
        "restart",
        options={"seconds": 20.0},
        alone=True,
    ),
    "nic_flaps": Kind(
        inject.port({"ports/1/state": "1: DOWN"}, times=2),
        "node",
        ("nic", "nic_mlx5_0/1"),
        "node",
        "restart",
        options={"seconds": 3.0},
    ),
    "nic_settings": Kind(
        inject.port({"ports/1/rate": "100 Gb/sec (4X EDR)", "tc/1/traffic_class": "0"}),
        "node",
        ("nic_settings", "nic_mlx5_0/1", "oddity"),
        "node",
        "alert",
    ),
    # ---- the control plane
    "driver_kill": Kind(
        inject_control.driver_kill, "job", (), "", "readopt", options={"seconds": 1.0}
    ),
    "driver_and_node": _node(inject_control.driver_and_node, "node_gone", seconds=1.0),
    "second_driver": Kind(inject_control.second_driver, "job", (), "", "unmoved"),
    "clock_skew": Kind(inject.clock, "node", (), "", "unmoved", options={"seconds": 3600.0}),
    "fuzz": Kind(inject_control.fuzz, "job", (), "", "unmoved", options={"requests": 400}),
}

_HAS: dict[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() == 0,
    "namespaces": lambda: shutil.which("ip") is not None,
    "cgroup memory": lambda: cgroups.is_writable("memory"),
    "cgroup freezer": lambda: cgroups.is_writable("freezer"),
}


def kind_named(name: str) -> Kind:
    """ConfigError with the nearest legal one for a name that is none."""
    if name in KINDS:
        return KINDS[name]
    near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown fault {name!r}; {hint or 'legal: ' + ', '.join(KINDS)}")


def missing(name: str) -> str:
    """What this machine lacks for a fault; "" where it can be done."""
    return ", ".join(need for need in KINDS[name].needs if not _HAS[need]())
