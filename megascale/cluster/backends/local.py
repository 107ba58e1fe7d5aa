"""Agents as processes of this machine: the default, and what faults are tried on.

Hosts are logical (`node0`, `node1`, ...), so that block list, spares and switches behave as on a
cluster, and finite, so that they can run out. With `namespaces` each host has a network of its own
(`namespaces.py`), which `partition` cuts. An agent is known by pid and start time and found by a
mark in its environment (`processes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import Field, model_validator

from megascale.cluster.agent import page_folders
from megascale.cluster.backends import processes
from megascale.cluster.backends.base import (
    AgentStart,
    BackendError,
    Machine,
    MachineEvent,
    agent_argv,
    node_argv,
    parse_options,
    switches_of,
)
from megascale.cluster.backends.namespaces import Namespaces, check_root
from megascale.cluster.backends.register import Record, Register, State
from megascale.config.base import Section
from megascale.env import child_environment
from megascale.errors import LaunchError


class LocalOptions(Section):
    """What `--set` of the backend may say."""

    hosts: int = Field(64, ge=1, le=10_000, description="logical hosts of this machine")
    hosts_per_switch: int = Field(0, ge=0, description="0: all under no known switch")
    namespaces: bool = Field(False, description="a network a host; needs root")
    subnet: str = Field("10.213.0.0/24", description="of the namespaces; the driver has its .1")
    grace_s: float = Field(5.0, ge=0.0, description="between asking an agent to end and ending it")
    kill_deadline_s: float = Field(10.0, gt=0.0, description="what then still runs blocks its host")

    @model_validator(mode="after")
    def _addresses_suffice(self) -> LocalOptions:
        if self.namespaces and self.hosts > 250:
            raise ValueError(f"hosts is {self.hosts}; with namespaces at most 250 (one a subnet)")
        return self


def check(options: Mapping[str, Any], num_nodes: int) -> None:
    """Raises LaunchError before anything is made; see `CHECKS` of the package."""
    chosen = parse_options(LocalOptions, "local", options)
    if num_nodes > chosen.hosts:
        raise LaunchError(
            f"{num_nodes} nodes on {chosen.hosts} hosts of the local backend; ask for fewer, or "
            f"raise them with --backend-set hosts={num_nodes}"
        )
    if chosen.namespaces:
        check_root()


class LocalBackend:
    """See the module. One a job; `start.run_dir` holds the register and the agents' output."""

    def __init__(self, start: AgentStart, options: Mapping[str, Any]) -> None:
        self._options = parse_options(LocalOptions, "local", options)
        self._start = start
        self._register = Register(start.run_dir, "local")
        self._noted: list[MachineEvent] = []  # of evictions, for the next `watch`
        self._net: Namespaces | None = None
        if self._options.namespaces:
            self._net = Namespaces(self._options.subnet, start.driver_url)

    def allocate(self, count: int, *, exclude: Sequence[str] = ()) -> list[Machine]:
        if not self._register.claimed:
            self.adopt([])
        with self._register.held() as state:
            hosts = self._free_hosts(state, exclude, near=())
            if len(hosts) < count:
                raise BackendError(
                    f"{count} machines were asked for, {len(hosts)} can be given: "
                    f"{self._options.hosts} hosts, {len(state.machines)} in use, "
                    f"{len(state.blocked)} blocked by this job; ask for fewer, or raise hosts"
                )
            return self._give(state, hosts[:count])

    def replenish(
        self, count: int, *, exclude: Sequence[str] = (), near: Sequence[str] = ()
    ) -> list[Machine]:
        with self._register.held() as state:
            return self._give(state, self._free_hosts(state, exclude, near)[:count])

    def evict(self, name: str, reason: str, *, block: bool) -> None:
        with self._register.held() as state:
            record = state.drop(name, block=reason if block else None)
            job = state.job
        if record is not None:
            self._end(job, [record])

    def watch(self) -> list[MachineEvent]:
        with self._register.held() as state:
            events, self._noted = self._noted, []
            gone = [r for r in state.machines.values() if _agent_pid(r) is None]
            for record in gone:
                state.drop(record.name)
                processes.kill(_mark(state.job, record.name))  # it is no more: nor are its ranks
                self._without_network(record)
                page_folders.clear_dead()
                reason = f"the agent's process ended: {_reap(record) or 'by whom is not known'}"
                events.append(MachineEvent(record.name, "gone", reason))
        return events

    def adopt(self, machines: Sequence[Machine]) -> list[Machine]:
        with self._register.held(claim=True) as state:
            known = [state.machines[m.name] for m in machines if m.name in state.machines]
            alive = [record for record in known if _agent_pid(record) is not None]
            stale = self._forget(state, keep={record.name for record in alive})
            job = state.job
        if self._net:
            self._net.open()
        self._end(job, stale)
        return [record.machine() for record in alive]

    def close(self) -> None:
        with self._register.held(claim=True) as state:
            stale = self._forget(state, keep=set())
            job = state.job
        self._end(job, stale)
        if self._net:
            self._net.close()

    def partition(self, name: str, down: bool) -> None:
        """Cut the machine's network off, or restore it. For fault tests; needs `namespaces`."""
        if self._net is None:
            raise BackendError(
                "partition needs the local backend's option namespaces = true; without it all "
                "agents share this machine's network"
            )
        with self._register.held() as state:
            if name not in state.machines:
                raise BackendError(f"no machine {name!r}; there are {', '.join(state.machines)}")
            self._net.cut(_index(state.machines[name].host), down)

    def _give(self, state: State, hosts: Sequence[str]) -> list[Machine]:
        """Start an agent on each of `hosts`; all or none."""
        records = [
            Record(name=state.new_name(host), host=host, switch=self._switch(host))
            for host in hosts
        ]
        state.machines.update({record.name: record for record in records})
        self._register.write(state)  # intent first
        try:
            for record in records:
                record.handle = self._start_agent(state.job, record)
        except BackendError:
            for record in records:
                state.drop(record.name)
                processes.kill(_mark(state.job, record.name))
                self._without_network(record)
                _reap(record)
            raise
        return [record.machine() for record in records]

    def _start_agent(self, job: str, record: Record) -> str:
        argv = agent_argv(self._start)
        argv += node_argv(record.name, record.host, record.switch)
        if self._net:
            argv = self._net.join(_index(record.host)) + argv
        log = str(self._register.folder / f"{record.name}.log")
        environment = child_environment({processes.MARK: _mark(job, record.name)})
        pid = processes.start(argv, environment, log)
        return f"{pid}:{processes.start_ticks(pid) or 0}"

    def _end(self, job: str, records: Sequence[Record]) -> None:
        """End these machines' processes; those that do not end block their host."""
        left = processes.end(
            {_mark(job, record.name): _agent_pid(record) for record in records},
            f"{job}/",
            grace_s=self._options.grace_s,
            kill_s=self._options.kill_deadline_s,
        )
        page_folders.clear_dead()
        for record in records:
            _reap(record)
            if pids := left.get(_mark(job, record.name)):
                self._condemn(record, pids)
            else:
                self._without_network(record)

    def _condemn(self, record: Record, pids: Sequence[int]) -> None:
        reason = (
            f"processes {', '.join(map(str, pids))} did not end within "
            f"{self._options.kill_deadline_s:g} s; {record.host} is blocked"
        )
        with self._register.held() as state:
            state.blocked[record.host] = reason
            self._noted.append(MachineEvent(record.name, "gone", reason))

    def _without_network(self, record: Record) -> None:
        if self._net:
            self._net.leave(_index(record.host))

    def _forget(self, state: State, keep: set[str]) -> list[Record]:
        """Take out all machines but `keep`; those, and what of the job runs beside, are to end."""
        gone = [state.drop(name) for name in set(state.machines) - keep]
        names = {mark.split("/")[1] for mark in processes.members(f"{state.job}/")} - keep
        known = {record.name: record for record in gone if record is not None}
        return [
            known.get(name) or Record(name=name, host=state.past.get(name, name))
            for name in names | set(known)
        ]

    def _free_hosts(self, state: State, exclude: Sequence[str], near: Sequence[str]) -> list[str]:
        """Hosts that may be given, best first: near, then least often given, then by number."""
        taken = {record.host for record in state.machines.values()}
        taken.update(exclude, state.blocked)
        hosts = [host for i in range(self._options.hosts) if (host := f"node{i}") not in taken]
        switches = switches_of(near, state.switches())
        return sorted(
            hosts, key=lambda h: (self._switch(h) not in switches, state.given.get(h, 0), _index(h))
        )

    def _switch(self, host: str) -> str | None:
        size = self._options.hosts_per_switch
        return f"switch{_index(host) // size}" if size else None


def _agent_pid(record: Record) -> int | None:
    """The agent's pid if it lives and is that very process."""
    pid, _, ticks = record.handle.partition(":")
    return int(pid) if pid and processes.start_ticks(int(pid)) == int(ticks) else None


def _reap(record: Record) -> str:
    """How the agent ended, if it was this process's child."""
    pid = record.handle.partition(":")[0]
    return processes.exit_reason(int(pid)) if pid else ""


def _mark(job: str, name: str) -> str:
    return f"{job}/{name}"


def _index(host: str) -> int:
    with suppress(ValueError):
        return int(host.removeprefix("node"))
    raise BackendError(f"{host!r} is no host of the local backend; they are node0, node1, ...")
