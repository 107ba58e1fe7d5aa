"""Kubernetes has the machines: agents are pods of JobSets (`kubernetes_manifests.py`).

The machines that a job starts with are one JobSet, each that is added later is one more, so that
what did not start can be taken back whole. To evict is to delete the pod; its host is kept out by
node anti-affinity in later JobSets and, with `taint`, from everybody. Agents that a person applied
from `render` are taken before new ones are asked for.

**Tested against a stand-in for the API server only** (docs/add-a-backend.md), never on a cluster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megascale.cluster.backends.base import (
    AgentStart,
    BackendError,
    Machine,
    MachineEvent,
    Sizes,
    parse_options,
    switches_of,
)
from megascale.cluster.backends.kubernetes_api import Api, Pod, VersionTooOldError
from megascale.cluster.backends.kubernetes_manifests import (
    JOB,
    RENDERED,
    RUN,
    KubernetesOptions,
    Wish,
    jobset,
    jobset_name,
    read_token,
    secret,
)
from megascale.cluster.backends.register import Record, Register, State

POLL_S = 0.2
_log = logging.getLogger(__name__)


def check(options: Mapping[str, Any], _num_nodes: int) -> None:
    """Raises MegascaleError before anything is made; see `CHECKS` of the package."""
    Api(parse_options(KubernetesOptions, "kubernetes", options))


class KubernetesBackend:
    """See the module. `start.run_dir` is on the volume claim, also for the driver."""

    def __init__(self, start: AgentStart, sizes: Sizes, options: Mapping[str, Any]) -> None:
        self._options = parse_options(KubernetesOptions, "kubernetes", options)
        self._start = start
        self._sizes = sizes
        self._api = Api(self._options)
        self._register = Register(start.run_dir, "kubernetes")
        self._selector = f"{JOB}={self._options.name}"
        self._version: str | None = None  # of the pods that `watch` has seen
        self._silent: set[str] = set()  # machines whose pod is not ready
        self._noted: list[MachineEvent] = []

    def allocate(self, count: int, *, exclude: Sequence[str] = ()) -> list[Machine]:
        if not self._register.claimed:
            self.adopt([])
        with self._register.held() as state:
            avoid = {*exclude, *state.blocked}
            reserve = self._reserve(state, avoid)[:count]
        missing = count - len(reserve)
        made = self._create([missing] if missing else [], Wish(avoid))
        placed, words = self._wait_placed(made, missing, self._options.allocate_s, all_needed=True)
        if len(placed) < missing:
            self._remove(made)
            raise BackendError(
                f"{count} machines were asked for, Kubernetes started "
                f"{len(placed) + len(reserve)} within {self._options.allocate_s:g} s"
                f"{f' ({words})' if words else ''}; all are given back. Ask for fewer, or wait "
                "longer (allocate_s)"
            )
        return self._give([*reserve, *placed])

    def replenish(
        self, count: int, *, exclude: Sequence[str] = (), near: Sequence[str] = ()
    ) -> list[Machine]:
        with self._register.held() as state:
            avoid = {*exclude, *state.blocked}
            wish = Wish(avoid, switches_of(near, state.switches()))
            reserve = self._reserve(state, avoid)
        reserve.sort(key=lambda pod: self._switch(pod.host) not in wish.near)
        reserve = reserve[:count]
        missing = count - len(reserve)
        made = self._create([1] * missing, wish)
        seconds = self._options.replenish_s
        placed, _ = self._wait_placed(made, missing, seconds, all_needed=False)
        self._remove(set(made) - {pod.jobset for pod in placed})
        return self._give([*reserve, *placed])

    def evict(self, name: str, reason: str, *, block: bool) -> None:
        with self._register.held() as state:
            record = state.drop(name, block=reason if block else None)
            host = state.past[name]
        if block and self._options.taint:
            try:
                self._api.taint(host, reason)
            except BackendError as error:
                _log.warning("%s is kept out of this job only, not tainted: %s", host, error)
        if record is not None:
            self._end({record.name: record.host})

    def watch(self) -> list[MachineEvent]:
        with self._register.held():
            events, self._noted = self._noted, []
        try:
            if self._version is None:
                raise VersionTooOldError
            changes, self._version = self._api.changes(self._selector, self._version)
            seen = [(pod.name, None if kind == "deleted" else pod) for kind, pod in changes]
        except VersionTooOldError:
            pods, self._version = self._api.pods(self._selector)
            with self._register.held() as state:
                seen = [(name, pods.get(name)) for name in state.machines]
        with self._register.held() as state:
            for name, pod in seen:  # in order: the first that ends a machine knows best why
                event = self._judge(name, pod) if name in state.machines else None
                if event is not None:
                    events.append(event)
                    if event.kind in ("gone", "preempted"):
                        state.drop(name)
        return events

    def adopt(self, machines: Sequence[Machine]) -> list[Machine]:
        with self._register.held(claim=True) as state:
            pods, self._version = self._api.pods(self._selector)
            known = [state.machines[m.name] for m in machines if m.name in state.machines]
            alive = [r for r in known if r.name in pods and pods[r.name].runs]
            kept = {record.name for record in alive}
            lost = {name: state.machines[name].host for name in set(state.machines) - kept}
            for name in lost:
                state.drop(name)
            own = f"{self._selector},{RUN}={state.job}"
            run = state.job
        used = {pods[name].jobset for name in kept}
        strays = {pod.name: pod.host for pod in pods.values() if pod.run == run}
        strays.update((name, host) for name, host in lost.items() if name in pods)
        self._remove(set(self._api.jobsets(own)) - used)
        self._end({name: host for name, host in strays.items() if name not in kept})
        return [record.machine() for record in alive]

    def close(self) -> None:
        self.adopt([])
        with self._register.held() as state:
            run = state.job
        self._remove(self._api.jobsets(f"{self._selector},{RUN}={RENDERED}"))
        self._api.delete_secret(f"{self._options.name}-{run}")

    def _create(self, counts: Sequence[int], wish: Wish) -> list[str]:
        """A JobSet of each of `counts` agents; their names."""
        if not counts:
            return []
        with self._register.held() as state:
            run = state.job
            names = [jobset_name(self._options, run, state.count("/jobset")) for _ in counts]
        self._api.create_secret(secret(self._options, run, read_token(self._start)))
        for name, count in zip(names, counts, strict=True):
            body = jobset(self._options, run, name, self._start, count, self._sizes, wish)
            self._api.create_jobset(body)
        return names

    def _wait_placed(
        self, made: Sequence[str], count: int, seconds: float, *, all_needed: bool
    ) -> tuple[list[Pod], str]:
        """Pods of the JobSets that run at the end of the wait, and why others do not."""
        placed: list[Pod] = []
        words: set[str] = set()

        def settled() -> bool:
            there, _ = self._api.pods(self._selector)
            pods = [pod for pod in there.values() if pod.jobset in made]
            placed[:] = [pod for pod in pods if pod.runs]
            words.clear()
            words.update(pod.words for pod in pods if not pod.runs and pod.words)
            fell = [pod for pod in pods if pod.phase in ("Failed", "Succeeded")]
            return len(placed) == count or (all_needed and bool(fell))

        if count:
            _wait(settled, seconds)
        return placed, "; ".join(sorted(words))

    def _reserve(self, state: State, avoid: Collection[str]) -> list[Pod]:
        """Running agents of an applied `render` that were not given yet."""
        pods, _ = self._api.pods(f"{self._selector},{RUN}={RENDERED}")
        over = {*state.machines, *state.past}
        return [p for p in pods.values() if p.runs and p.name not in over and p.host not in avoid]

    def _give(self, pods: Sequence[Pod]) -> list[Machine]:
        records = [
            Record(name=pod.name, host=pod.host, switch=self._switch(pod.host), handle=pod.jobset)
            for pod in pods
        ]
        with self._register.held() as state:
            state.machines.update({record.name: record for record in records})
        return [record.machine() for record in records]

    def _remove(self, jobsets: Collection[str]) -> None:
        """Delete JobSets and wait for their pods."""
        for name in jobsets:
            self._api.delete_jobset(name)
        pods, _ = self._api.pods(self._selector) if jobsets else ({}, "")
        self._end({pod.name: pod.host for pod in pods.values() if pod.jobset in jobsets})

    def _end(self, hosts: Mapping[str, str]) -> None:
        """Delete pods (name -> host); one that does not go is removed by force, its host blocked.

        By force means that Kubernetes forgets it: its node may be cut off and still run it.
        """
        for name in hosts:
            self._api.delete_pod(name, self._options.grace_s)
        left = set(hosts)

        def gone() -> bool:
            left.intersection_update(self._api.pods(self._selector)[0])
            return not left

        if not left or _wait(gone, self._options.kill_deadline_s):
            return
        for name in left:
            self._api.delete_pod(name, 0)
        with self._register.held() as state:
            for name in left:
                reason = (
                    f"its pod did not end within {self._options.kill_deadline_s:g} s and was "
                    f"removed by force; {hosts[name] or 'its host'} is blocked"
                )
                state.blocked[hosts[name]] = reason
                self._noted.append(MachineEvent(name, "gone", reason))

    def _judge(self, name: str, pod: Pod | None) -> MachineEvent | None:
        """What a pod's state says of its machine; `None`: there is no such pod."""
        if pod is None:
            return MachineEvent(name, "gone", "its pod was deleted")
        if pod.leaving or pod.phase in ("Failed", "Succeeded"):
            state = "is being deleted" if pod.leaving else pod.phase
            reason = f"its pod: {pod.words or state}"
            return MachineEvent(name, "preempted" if pod.preempted else "gone", reason)
        if pod.runs and not pod.ready and name not in self._silent:
            self._silent.add(name)
            return MachineEvent(name, "down", f"its pod is not ready: {pod.words}")
        if pod.ready and name in self._silent:
            self._silent.discard(name)
            return MachineEvent(name, "up", "its pod is ready again")
        return None

    def _switch(self, host: str) -> str | None:
        if not self._options.switch_label:
            return None
        return self._api.node_labels(host).get(self._options.switch_label)


def _wait(ready: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
