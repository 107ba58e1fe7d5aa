"""What driver and agents say to each other: JSON over HTTP, one model a message. Version 1.

    POST /v1/join       Join       -> Joined        once by each incarnation of an agent
    POST /v1/heartbeat  Heartbeat  -> Heard         each second
    GET  /v1/commands?node=&incarnation=&after=     long poll, at most POLL_S: list of Command
    POST /v1/results    Result     -> Heard         once a command

What people say is in `people.py`. All with `Authorization: Bearer TOKEN`. Unknown fields are
refused; what is not known is absent. Sizes are bounded here, so that one agent cannot fill the
driver: texts are cut by the sender to TEXT characters, lists by their `max_length`.

Times: `age_s` and other durations are the sender's own monotonic differences; `unix_ns` is for
people and never compared.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION: Literal[1] = 1
POLL_S = 20.0
TEXT = 2_000
BODY_BYTES = 1 << 20  # a larger request is refused unread

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\w.:@/+-]+$")]
Text = Annotated[str, Field(max_length=TEXT)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
WarmNodes = Literal["off", "spares", "all"]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# ---------------------------------------------------------------- a node and its ranks


class NodeFacts(Message):
    """What a node is; sent once, when it joins."""

    host: Name
    ip: Name
    pod_name: Name | None = None
    switch: Name | None = None  # the leaf that it hangs on, where the backend knows
    num_cpus: Count
    memory_bytes: Count
    devices: list[Text] = Field(default_factory=list, max_length=64)
    versions: dict[str, str] = Field(default_factory=dict)


class Progress(Message):
    """The two records of a rank's progress page (`events.py`).

    age_s           since the host last issued anything
    completed_step  and `completed_phase`: what the device last finished
    group_id, seq   of the last collective: CRC-32 of its group's name, its number in that group
    saved           tensors and blocks that the save under way has moved; None: none that tells
    """

    epoch: Count
    step: Count
    phase: Name
    age_s: Seconds
    chunk: Count | None = None
    micro_batch: Count | None = None
    group_id: Count | None = None
    seq: Count | None = None
    saved: Count | None = None
    completed_step: Count | None = None
    completed_phase: Name | None = None


class Failure(Message):
    """The first thing that went wrong in a rank, from its error file, its log or the kernel.

    kind  "exception", "signal", "exit", "out_of_memory", "disk_full", "numerical", "device",
          "network", "launch": as `agent/log_rules.py` tells them apart
    """

    kind: Name
    message: Text
    unix_ns: Count
    exit_code: int | None = None
    signal: Name | None = None
    rule: Name | None = None  # of the log line, where one spoke


class StepSums(Message):
    """Time of one step of a rank by phase, ns, of its own clock; from its line file."""

    step: Count
    total_ns: Count
    phases: dict[str, int] = Field(default_factory=dict, max_length=64)


class Noticed(Message):
    """An incident that the trainer recorded itself: nonfinite, replicas_differ, checkpoint, ...."""

    name: Name
    step: Count | None = None
    detail: dict[str, Any] = Field(default_factory=dict)


class RankReport(Message):
    """One rank of a node at one moment.

    state     "starting" until its first progress, "running", "exited", "unkillable"
    os_state  of /proc/PID/stat: R, S, D, T, Z, ...
    steps     finished since the last heartbeat; at most the newest 64
    """

    rank: Count
    local_rank: Count
    pid: Count
    epoch: Count
    state: Literal["starting", "running", "exited", "unkillable"]
    os_state: Annotated[str, Field(max_length=1)] | None = None
    uptime_s: Seconds = 0.0
    exit_code: int | None = None  # negative: the signal that ended it
    rss_bytes: Count | None = None
    progress: Progress | None = None
    failure: Failure | None = None
    steps: list[StepSums] = Field(default_factory=list, max_length=64)
    noticed: list[Noticed] = Field(default_factory=list, max_length=16)


class DeviceReport(Message):
    """A GPU as NVML sees it, or that NVML did not answer in time (`answered` false)."""

    index: Count
    answered: bool = True
    uuid: Name | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    throttle: list[Name] = Field(default_factory=list, max_length=16)
    xid: list[Count] = Field(default_factory=list, max_length=64)  # since the last heartbeat
    ecc_uncorrected: Count | None = None
    memory_used_bytes: Count | None = None


class NicReport(Message):
    """A network interface or RDMA port: state, counters since boot, settings (text as read)."""

    name: Name
    up: bool
    flaps: Count = 0  # transitions down since the agent started
    down_s: Seconds = 0.0  # of the present or last outage
    counters: dict[str, int] = Field(default_factory=dict, max_length=64)
    settings: dict[str, str] = Field(default_factory=dict, max_length=64)


class LogMatch(Message):
    """A rule of the log that matched; equal ones are counted, the first line is kept."""

    rule: Name
    rank: Count | None = None  # None: the kernel's log
    line: Text
    count: Count = 1
    unix_ns: Count


# ---------------------------------------------------------------- agent to driver


class Join(Message):
    """A new incarnation of an agent. `ranks`: those that it runs already (after a re-adoption)."""

    version: Literal[1] = VERSION
    node: Name
    incarnation: Name
    epoch: Count
    unix_ns: Count
    facts: NodeFacts
    ranks: list[RankReport] = Field(default_factory=list, max_length=1024)


class Joined(Message):
    """epoch: of the job now; node_rank: None for a spare.

    save_deadline_s  how long a rank that is asked to save may take before it is ended
    warm, procs_per_node  on which nodes a process a rank is kept that has imported what it needs
    """

    epoch: Count
    node_rank: Count | None = None
    heartbeat_interval_s: Seconds
    orphan_timeout_s: Seconds
    grace_s: Seconds
    kill_deadline_s: Seconds
    save_deadline_s: Seconds = 600.0
    warm: WarmNodes = "off"
    procs_per_node: Count = 0


class Heartbeat(Message):
    """Liveness by being sent, progress inside; the two are judged apart.

    done          sequence number up to which every command has come to its end
    first_failed  the rank of this node whose failure the others' follow from
    """

    node: Name
    incarnation: Name
    epoch: Count
    sequence: Count
    unix_ns: Count
    done: Count = 0
    ranks: list[RankReport] = Field(default_factory=list, max_length=1024)
    devices: list[DeviceReport] = Field(default_factory=list, max_length=64)
    nics: list[NicReport] = Field(default_factory=list, max_length=64)
    log: list[LogMatch] = Field(default_factory=list, max_length=64)
    first_failed: Count | None = None


class Heard(Message):
    """`known` false: the driver has no such incarnation: join again. `leave`: evicted, go."""

    epoch: Count
    known: bool = True
    leave: bool = False


class Result(Message):
    """What came of a command. `detail` by kind of command; bounded by BODY_BYTES."""

    node: Name
    incarnation: Name
    epoch: Count
    sequence: Count
    ok: bool
    reason: Text = ""
    detail: dict[str, Any] = Field(default_factory=dict)


# ---------------------------------------------------------------- driver to agent


class RankPlace(Message):
    rank: Count
    local_rank: Count


class StartRanks(Message):
    """Start these ranks as `python -m megascale ARGUMENTS` under torchrun's variables.

    program  argv; None: this interpreter with `-m megascale`
    """

    kind: Literal["start"] = "start"
    ranks: list[RankPlace] = Field(max_length=1024)
    world_size: Count
    local_world_size: Count
    master_addr: Name
    master_port: Count
    arguments: list[str]
    program: list[str] | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    run_dir: str


class StopRanks(Message):
    """End every rank of an epoch up to this command's: asked first, then killed.

    save  ask them to save what they have (SIGTERM and as long as a save may take)
    """

    kind: Literal["stop"] = "stop"
    save: bool = False


class RunSelfCheck(Message):
    """Run the node's self-check; `peers` for the checks that need two nodes or more."""

    kind: Literal["selfcheck"] = "selfcheck"
    level: Literal["light", "full"] = "light"
    peers: list[Name] = Field(default_factory=list, max_length=64)
    deadline_s: Seconds = 60.0


class DumpStacks(Message):
    """py-spy dumps and flight recorders of these ranks, as they are."""

    kind: Literal["dump"] = "dump"
    ranks: list[Count] = Field(max_length=1024)


class Leave(Message):
    """End everything and exit."""

    kind: Literal["leave"] = "leave"


Order = Annotated[
    StartRanks | StopRanks | RunSelfCheck | DumpStacks | Leave, Field(discriminator="kind")
]


class Command(Message):
    """An order to one node. Sequence numbers grow over epochs; obeying one twice is harmless."""

    epoch: Count
    sequence: Count
    order: Order
