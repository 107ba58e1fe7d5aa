"""A stand-in for Kubernetes: the few paths of the API, a scheduler, JobSets, and kubelets.

A pod's command runs as a process of this machine. What is kept of the real thing, because the
backend relies on it: resource versions and watches that begin at one, 410 for those forgotten,
Indexed jobs whose index fails for good, node affinity and taints, one pod a host where the template
asks for it, deletion in two steps. Nothing else: it proves the calls, not a cluster.
"""

from __future__ import annotations

import base64
import copy
import itertools
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

Object = dict[str, Any]
HOST = "kubernetes.io/hostname"
TICK_S = 0.03


class FakeCluster:
    """Nodes worker0, ...; `switch_of` labels them. All state under one lock."""

    def __init__(self, folder: Path, switch_label: str, switch_of: dict[str, str]) -> None:
        self.lock = threading.Condition()
        self.folder = folder
        self.kinds: dict[str, dict[str, Object]] = {
            kind: {} for kind in ("pods", "jobsets", "secrets", "nodes")
        }
        self.log: list[tuple[int, str, Object]] = []
        self.forgotten = 0  # resource versions up to here
        self.calls: list[str] = []
        self.refuse: dict[str, int] = {}  # "METHOD kind" -> status
        self.cut: set[str] = set()  # nodes whose kubelet does not answer
        self._asked: dict[str, float] = {}
        self._processes: dict[str, tuple[subprocess.Popen[bytes], list[psutil.Process]]] = {}
        self._numbers = itertools.count(1)
        for host, switch in switch_of.items():
            node = {"metadata": {"name": host, "labels": {HOST: host, switch_label: switch}}}
            self.put("nodes", node | {"spec": {}, "status": {}})

    def put(self, kind: str, thing: Object, event: str = "MODIFIED") -> None:
        thing["metadata"]["resourceVersion"] = str(next(self._numbers))
        if event == "DELETED":
            self.kinds[kind].pop(thing["metadata"]["name"], None)
        else:
            self.kinds[kind][thing["metadata"]["name"]] = thing
        if kind == "pods":
            version = int(thing["metadata"]["resourceVersion"])
            self.log.append((version, event, copy.deepcopy(thing)))
            self.lock.notify_all()

    def forget(self) -> None:
        """As etcd does after some minutes: no watch can begin before now."""
        with self.lock:
            self.forgotten = next(self._numbers)

    def create(self, kind: str, thing: Object) -> None:
        thing["metadata"].setdefault("labels", {})
        self.put(kind, thing, "ADDED")
        if kind == "jobsets":
            (job,) = thing["spec"]["replicatedJobs"]
            spec = job["template"]["spec"]
            assert spec["completionMode"] == "Indexed"
            assert spec["backoffLimitPerIndex"] == 0, "else pods come back by themselves"
            assert spec["maxFailedIndexes"] >= spec["completions"], "else one ends all"
            assert thing["spec"]["failurePolicy"]["maxRestarts"] == 0
            for index in range(spec["completions"]):
                self._create_pod(thing["metadata"]["name"], job["name"], index, spec["template"])

    def _create_pod(self, jobset: str, job: str, index: int, template: Object) -> None:
        name = f"{jobset}-{job}-0-{index}-{next(self._numbers):05d}"
        assert len(name) <= 63, name
        pod = copy.deepcopy(template)
        labels = pod["metadata"]["labels"] | {"jobset.sigs.k8s.io/jobset-name": jobset}
        pod["metadata"] = {"name": name, "labels": labels}
        pod["status"] = {"phase": "Pending"}
        assert pod["spec"]["restartPolicy"] == "Never", "backoffLimitPerIndex asks for it"
        self.put("pods", pod, "ADDED")

    def delete(self, kind: str, thing: Object, grace_s: int | None) -> None:
        if kind == "jobsets":
            self.put(kind, thing, "DELETED")
            for pod in list(self.kinds["pods"].values()):
                if (
                    pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]
                    == (thing["metadata"]["name"])
                ):
                    self.delete("pods", pod, None)
        elif kind != "pods" or grace_s == 0 or "nodeName" not in thing["spec"]:
            self.put(kind, thing, "DELETED")
        elif "deletionTimestamp" not in thing["metadata"]:
            grace = thing["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
            thing["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            thing["metadata"]["deletionGracePeriodSeconds"] = grace
            self.put(kind, thing)

    def tick(self) -> None:
        """One round of the scheduler and of all kubelets."""
        with self.lock:
            for pod in list(self.kinds["pods"].values()):
                if "nodeName" not in pod["spec"]:
                    self._schedule(pod)
                elif pod["spec"]["nodeName"] not in self.cut:
                    self._kubelet(pod)
            for name in set(self._processes) - set(self.kinds["pods"]):
                self._kill(name)  # removed by force: a kubelet that answers ends it

    def _schedule(self, pod: Object) -> None:
        affinity = pod["spec"]["affinity"]
        (apart,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart["topologyKey"] == HOST
        same = apart["labelSelector"]["matchLabels"].items()
        taken = {
            other["spec"].get("nodeName")
            for other in self.kinds["pods"].values()
            if same <= other["metadata"]["labels"].items()
            and other["status"]["phase"] in ("Pending", "Running")
        }
        node_affinity = affinity.get("nodeAffinity", {})
        required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
        terms = required.get("nodeSelectorTerms", [{"matchExpressions": []}])
        preferred = node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
        free = [
            name
            for name, node in self.kinds["nodes"].items()
            if name not in taken
            and not node["spec"].get("taints")
            and any(_matches(node, term) for term in terms)
        ]
        if not free:
            message = f"0/{len(self.kinds['nodes'])} nodes are available"
            placed = {"type": "PodScheduled", "status": "False", "message": message}
            if pod["status"].get("conditions") != [placed]:
                pod["status"]["conditions"] = [placed]
                self.put("pods", pod)
            return
        nodes = self.kinds["nodes"]
        pod["spec"]["nodeName"] = max(
            free,
            key=lambda n: sum(
                p["weight"] for p in preferred if _matches(nodes[n], p["preference"])
            ),
        )
        self._start(pod)
        ready = {"type": "Ready", "status": "True"}
        pod["status"] = {"phase": "Running", "conditions": [ready]}
        self.put("pods", pod)

    def _start(self, pod: Object) -> None:
        name, spec = pod["metadata"]["name"], pod["spec"]
        (container,) = spec["containers"]
        fields = {"metadata.name": name, "spec.nodeName": spec["nodeName"]}
        command = container["command"]
        for item in container["env"]:
            value = fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
            command = [word.replace(f"$({item['name']})", value) for word in command]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            if "secret" in volumes[mount["name"]]:
                secret = self.kinds["secrets"][volumes[mount["name"]]["secret"]["secretName"]]
                folder = self.folder / name
                folder.mkdir()
                for key, text in secret["data"].items():
                    (folder / key).write_bytes(base64.b64decode(text))
                command = [word.replace(mount["mountPath"], str(folder)) for word in command]
        process = subprocess.Popen(command, start_new_session=True)
        self._processes[name] = (process, [])

    def _kubelet(self, pod: Object) -> None:
        name, status = pod["metadata"]["name"], pod["status"]
        process, children = self._processes[name]
        if process.poll() is None and not children:
            children.extend(psutil.Process(process.pid).children(recursive=True))
        if "deletionTimestamp" in pod["metadata"]:
            if name not in self._asked:
                self._asked[name] = time.monotonic()
                process.terminate()
            grace = pod["metadata"]["deletionGracePeriodSeconds"]
            if process.poll() is not None or time.monotonic() - self._asked[name] > grace:
                self._kill(name)
                self.put("pods", pod, "DELETED")
        elif process.poll() is not None and status["phase"] == "Running":
            _end(children)  # as the container's cgroup does
            ended = {"exitCode": abs(process.returncode), "reason": "Error"}
            state: Object = {"name": "agent", "state": {"terminated": ended}}
            state |= {"image": "i", "imageID": "", "ready": False, "restartCount": 0}
            pod["status"] = {"phase": "Failed", "containerStatuses": [state]}
            self.put("pods", pod)

    def _kill(self, name: str) -> None:
        process, children = self._processes.pop(name)
        process.kill()
        process.wait()
        _end(children)

    def end(self) -> None:
        with self.lock:
            for name in list(self._processes):
                self._kill(name)


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():  # that very one: psutil compares start times
            process.kill()


def _matches(node: Object, term: Object) -> bool:
    def one(expression: Object) -> bool:
        inside = node["metadata"]["labels"].get(expression["key"]) in expression["values"]
        return inside == {"In": True, "NotIn": False}[expression["operator"]]

    return all(one(expression) for expression in term["matchExpressions"])
