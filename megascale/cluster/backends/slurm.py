"""Slurm has the machines: a job a machine, each through one sbatch.

Why not one job of N nodes: it cannot grow, its batch script lives on one of its nodes, and what
ends it ends everybody. With a job a machine, Slurm itself evicts one (scancel), adds one (sbatch)
and says why one went (its job state); no node's death, nor the driver's, touches the others. Price:
Slurm does not place them as one gang. While they wait, those that came early hold their nodes,
until all are there or `allocate_s` has passed, when all are given back. No job arrays: the number
of an array's last task is the array's own, and cancelling it would end all.

All jobs of a run carry one job name with a random part, by which a restarted driver finds them.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field

from megascale.cluster.backends import slurm_commands as slurm
from megascale.cluster.backends.base import (
    AgentStart,
    BackendError,
    Machine,
    MachineEvent,
    Sizes,
    agent_argv,
    node_argv,
    parse_options,
    switches_of,
)
from megascale.cluster.backends.register import Record, Register, State
from megascale.config.base import Section

POLL_S = 0.3
_SUBMITTERS = 8
_log = logging.getLogger(__name__)


class SlurmOptions(Section):
    """Where in the cluster, and how long to wait for it."""

    partition: str = Field("", description="empty: Slurm's default")
    gpus: bool = Field(True, description="reserve a GPU a process (--gpus-per-node)")
    arguments: str = Field("", description="more of sbatch's: '--account=A --time=1-0'")
    drain: bool = Field(True, description="drain a blocked node, where the user may")
    allocate_s: float = Field(600.0, gt=0.0, description="until all machines have started")
    replenish_s: float = Field(30.0, gt=0.0, description="until a machine more has started")
    kill_deadline_s: float = Field(60.0, gt=0.0, description="above Slurm's KillWait")


def check(options: Mapping[str, Any], _num_nodes: int) -> None:
    """Raises LaunchError before anything is made; see `CHECKS` of the package."""
    parse_options(SlurmOptions, "slurm", options)
    slurm.check_here()


class SlurmBackend:
    """See the module. The run folder must be on a file system that all nodes see."""

    def __init__(self, start: AgentStart, sizes: Sizes, options: Mapping[str, Any]) -> None:
        self._options = parse_options(SlurmOptions, "slurm", options)
        self._start = start
        self._procs_per_node = sizes.procs_per_node
        self._register = Register(start.run_dir, "slurm")
        self._switch_of: dict[str, str] | None = None
        self._silent: set[str] = set()  # machines whose node does not answer
        self._noted: list[MachineEvent] = []

    def allocate(self, count: int, *, exclude: Sequence[str] = ()) -> list[Machine]:
        if not self._register.claimed:
            self.adopt([])
        free, avoid, name = self._free(exclude)
        if len(free) < count:
            raise BackendError(
                f"{count} machines were asked for, {len(free)} can be given: the others of "
                f"{self._options.partition or 'all partitions'} are in use by this job, blocked, "
                "down or drained (sinfo -N tells); ask for fewer"
            )
        numbers = self._submit(name, [None] * count, avoid)
        placed = self._wait_placed(name, numbers, self._options.allocate_s, all_needed=True)
        if len(placed) < count:
            raise BackendError(
                f"{count} machines were asked for, Slurm started {len(placed)} within "
                f"{self._options.allocate_s:g} s; all are given back. Ask for fewer, wait longer "
                f"(allocate_s), or see {self._register.folder}/slurm-*.log if they started and fell"
            )
        return self._give(placed)

    def replenish(
        self, count: int, *, exclude: Sequence[str] = (), near: Sequence[str] = ()
    ) -> list[Machine]:
        free, avoid, name = self._free(exclude)
        with self._register.held() as state:
            wanted = switches_of(near, state.switches())
        beside = [h for h, node in free.items() if node.idle and self._switch(h) in wanted]
        pinned: list[str | None] = [*beside[:count]]
        rest = min(count, len(free)) - len(pinned)
        numbers = self._submit(name, pinned + [None] * rest, avoid)
        return self._give(
            self._wait_placed(name, numbers, self._options.replenish_s, all_needed=False)
        )

    def evict(self, name: str, reason: str, *, block: bool) -> None:
        with self._register.held() as state:
            record = state.drop(name, block=reason if block else None)
            host, job_name = state.past[name], _job_name(state)
        if block and self._options.drain and (refused := slurm.drain(host, f"megascale: {reason}")):
            _log.warning("%s is kept out of this job only, not drained: %s", host, refused)
        if record is not None:
            self._end(job_name, [record])

    def watch(self) -> list[MachineEvent]:
        with self._register.held() as state:
            events, self._noted = self._noted, []
            running = slurm.jobs(_job_name(state))
            lost = [
                record
                for record in state.machines.values()
                if record.handle not in running or not _runs(running[record.handle])
            ]
            for record in lost:
                events.append(_ended(record, running.get(record.handle)))
                state.drop(record.name)
            slurm.cancel(r.handle for r in lost if r.handle in running)  # suspended, requeued
            return events + self._answering(state)

    def adopt(self, machines: Sequence[Machine]) -> list[Machine]:
        with self._register.held(claim=True) as state:
            name = _job_name(state)
            running = slurm.jobs(name)
            known = [state.machines[m.name] for m in machines if m.name in state.machines]
            alive = [r for r in known if r.handle in running and _runs(running[r.handle])]
            kept = {record.handle for record in alive}
            for gone in set(state.machines) - {record.name for record in alive}:
                state.drop(gone)
        self._end(name, [_stray(job) for number, job in running.items() if number not in kept])
        return [record.machine() for record in alive]

    def close(self) -> None:
        self.adopt([])

    def _free(self, exclude: Sequence[str]) -> tuple[dict[str, slurm.Node], list[str], str]:
        """(nodes that could be given, nodes to avoid, the jobs' name)."""
        known = slurm.nodes(self._options.partition)
        with self._register.held() as state:
            avoid = {*exclude, *state.blocked} & set(known)  # sbatch refuses unknown names
            taken = {record.host for record in state.machines.values()}
            name = _job_name(state)
        free = {h: n for h, n in known.items() if n.usable and h not in avoid | taken}
        return free, sorted(avoid), name

    def _submit(self, name: str, hosts: Sequence[str | None], avoid: Sequence[str]) -> list[str]:
        """A job for each of `hosts` (None: Slurm chooses); their numbers. All or none."""
        arguments = [
            f"--job-name={name}",
            *("--nodes=1", "--ntasks=1", "--exclusive", "--no-requeue"),
            f"--output={self._register.folder}/slurm-%j.log",
            *([f"--partition={self._options.partition}"] if self._options.partition else []),
            *([f"--gpus-per-node={self._procs_per_node}"] if self._options.gpus else []),
            *([f"--exclude={','.join(avoid)}"] if avoid else []),
            *shlex.split(self._options.arguments),
        ]
        script = self._script()

        def one(host: str | None) -> str:
            return slurm.submit(script, [*arguments, *([f"--nodelist={host}"] if host else [])])

        with ThreadPoolExecutor(_SUBMITTERS) as pool:
            answers = [pool.submit(one, host) for host in hosts]
        errors = [error for answer in answers if (error := answer.exception()) is not None]
        numbers = [answer.result() for answer in answers if answer.exception() is None]
        if errors:
            slurm.cancel(numbers)
            raise errors[0]
        return numbers

    def _script(self) -> str:
        """What runs on the node. `exec`: Slurm's signals go to the agent, its exit code is ours."""
        place = node_argv('"$SLURMD_NODENAME.$SLURM_JOB_ID"', '"$SLURMD_NODENAME"')
        agent = f"{shlex.join(agent_argv(self._start))} {' '.join(place)}"
        return (
            "#!/bin/sh\n"
            'above="${SLURM_TOPOLOGY_ADDR%.*}"\n'  # spine.leaf.node without the node
            'case "${SLURM_TOPOLOGY_ADDR_PATTERN:-node}" in\n'
            f'    *switch.node) exec {agent} --switch "${{above##*.}}" ;;\n'
            f"    *) exec {agent} ;;\n"
            "esac\n"
        )

    def _wait_placed(
        self, name: str, numbers: Sequence[str], seconds: float, *, all_needed: bool
    ) -> list[slurm.Job]:
        """Those of the jobs that run at the end of the wait; the others are cancelled, and with
        `all_needed` all, if one is missing."""
        if not numbers:
            return []
        placed: list[slurm.Job] = []

        def settled() -> bool:
            running = slurm.jobs(name)
            there = [running[number] for number in numbers if number in running]
            placed[:] = [job for job in there if _runs(job)]
            lost_one = len(there) < len(numbers)
            return len(placed) == len(there) or (all_needed and lost_one)

        _wait(settled, seconds)
        keep = set() if all_needed and len(placed) < len(numbers) else {j.number for j in placed}
        slurm.cancel(number for number in numbers if number not in keep)
        return placed

    def _give(self, placed: Sequence[slurm.Job]) -> list[Machine]:
        records = [
            Record(
                name=f"{job.host}.{job.number}",
                host=job.host,
                switch=self._switch(job.host),
                handle=job.number,
            )
            for job in placed
        ]
        with self._register.held() as state:
            state.machines.update({record.name: record for record in records})
        return [record.machine() for record in records]

    def _end(self, job_name: str, records: Sequence[Record]) -> None:
        """Cancel these machines' jobs; a host where one does not end is blocked."""
        numbers = {record.handle for record in records}
        slurm.cancel(numbers)
        if _wait(lambda: not numbers & set(slurm.jobs(job_name)), self._options.kill_deadline_s):
            return
        left = slurm.jobs(job_name)
        with self._register.held() as state:
            for record in records:
                if record.handle in left and record.host:
                    reason = (
                        f"job {record.handle} did not end within "
                        f"{self._options.kill_deadline_s:g} s; {record.host} is blocked"
                    )
                    state.blocked[record.host] = reason
                    self._noted.append(MachineEvent(record.name, "gone", reason))

    def _answering(self, state: State) -> list[MachineEvent]:
        """Machines whose node has stopped to answer Slurm, or answers again."""
        nodes = slurm.nodes(self._options.partition)
        events = []
        for name, record in state.machines.items():
            node = nodes.get(record.host)
            silent = node is None or not node.answers
            if silent and name not in self._silent:
                words = f"{node.state}, {node.reason}" if node else "not in the partition"
                events.append(MachineEvent(name, "down", f"Slurm: {words}"))
            elif not silent and name in self._silent:
                events.append(MachineEvent(name, "up", "Slurm: the node answers again"))
            (self._silent.add if silent else self._silent.discard)(name)
        return events

    def _switch(self, host: str) -> str | None:
        if self._switch_of is None:
            self._switch_of = slurm.switches()
        return self._switch_of.get(host)


def _job_name(state: State) -> str:
    return f"megascale-{state.job}"


def _runs(job: slurm.Job) -> bool:
    return job.state == "RUNNING"


def _stray(job: slurm.Job) -> Record:
    return Record(name=f"{job.host}.{job.number}", host=job.host, handle=job.number)


def _ended(record: Record, job: slurm.Job | None) -> MachineEvent:
    state, words = slurm.outcome(record.handle)
    if job is not None and job.state != "COMPLETING":
        state, words = job.state, f"{job.state}, reason {job.reason}"
    return MachineEvent(
        record.name,
        "preempted" if state in ("PREEMPTED", "SUSPENDED") else "gone",
        f"job {record.handle}: {words}",
    )


def _wait(ready: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
