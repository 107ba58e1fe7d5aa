"""What a job is in Kubernetes, as documents: the token's Secret and JobSets (`kubernetes_render.py`
writes all that a person applies).

A JobSet (jobset.x-k8s.io/v1alpha2) places agents and gives them names in DNS. Nothing in it
restarts anything, because the driver decides: `backoffLimitPerIndex: 0` lets a pod's index fail
alone and for good, `maxFailedIndexes` lets all others go on, `maxRestarts: 0` keeps JobSet out of
it. A template cannot be changed later, so blocked hosts are written into each new JobSet, and each
machine more is a JobSet more. One agent a host, by pod anti-affinity.

Pure: no client is needed.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from megascale.cluster.backends.base import (
    AgentStart,
    BackendError,
    Sizes,
    agent_argv,
    node_argv,
)
from megascale.config.base import Section

API = "jobset.x-k8s.io/v1alpha2"
JOB, RUN, DRIVER = "megascale.dev/job", "megascale.dev/run", "megascale.dev/driver"
RENDERED = "rendered"  # the RUN of documents that a person applied
BLOCKED_TAINT = "megascale.dev/blocked"
HOST = "kubernetes.io/hostname"
TOKEN_FOLDER = "/var/run/megascale"
_DNS_LABEL = r"^[a-z]([a-z0-9-]{0,28}[a-z0-9])?$"  # a pod's name is 33 characters longer, of 63


class KubernetesOptions(Section):
    """Where in the cluster, in which image, and how long to wait for it."""

    image: str = Field(min_length=1, description="with megascale installed")
    claim: str = Field(
        min_length=1, description="volume claim, mounted at job.run_dir; none: a folder of the pod"
    )
    name: str = Field("megascale", pattern=_DNS_LABEL, description="of the job in its namespace")
    namespace: str = Field("default", min_length=1)
    context: str = Field("", description="of the kubeconfig; empty: the current one")
    api: str = Field("", description="URL of an API server without login; empty: as kubectl does")
    gpus: bool = Field(True, description="reserve a GPU a process (nvidia.com/gpu)")
    host_network: bool = Field(False, description="pods in their host's network, for RDMA")
    switch_label: str = Field("", description="label of nodes that names their switch")
    taint: bool = Field(False, description="taint a blocked node, so that all jobs avoid it")
    grace_s: int = Field(10, ge=0, description="between asking an agent to end and ending it")
    allocate_s: float = Field(600.0, gt=0.0, description="until all machines have started")
    replenish_s: float = Field(60.0, gt=0.0, description="until a machine more has started")
    kill_deadline_s: float = Field(60.0, gt=0.0, description="then a pod is removed by force")


@dataclass(frozen=True)
class Wish:
    """Which nodes a JobSet's pods may have, and which they would like (switches)."""

    avoid: Collection[str] = field(default_factory=tuple)
    near: Collection[str] = field(default_factory=tuple)


def read_token(start: AgentStart) -> str:
    try:
        return Path(start.token_file).read_text(encoding="utf-8")
    except OSError as error:
        raise BackendError(
            f"the token file {start.token_file} cannot be read: {error.strerror}"
        ) from None


def labels(options: KubernetesOptions, run: str) -> dict[str, str]:
    return {JOB: options.name, RUN: run}


def jobset_name(options: KubernetesOptions, run: str, number: int | None = None) -> str:
    return "-".join([options.name, run, *([str(number)] if number is not None else [])])


def secret(options: KubernetesOptions, run: str, token: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(options, run, f"{options.name}-{run}"),
        "type": "Opaque",
        "data": {"token": base64.b64encode(token.encode()).decode()},
    }


def jobset(
    options: KubernetesOptions,
    run: str,
    name: str,
    start: AgentStart,
    count: int,
    sizes: Sizes,
    wish: Wish | None = None,
) -> dict[str, Any]:
    """A JobSet of `count` agents."""
    job = {
        "completionMode": "Indexed",
        "parallelism": count,
        "completions": count,
        "backoffLimitPerIndex": 0,
        "maxFailedIndexes": count,
        "template": {
            "metadata": {"labels": labels(options, run)},
            "spec": _pod(options, run, start, sizes, wish or Wish()),
        },
    }
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": metadata(options, run, name),
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": "agents", "replicas": 1, "template": {"spec": job}}],
        },
    }


def metadata(options: KubernetesOptions, run: str, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": options.namespace, "labels": labels(options, run)}


def _pod(
    options: KubernetesOptions, run: str, start: AgentStart, sizes: Sizes, wish: Wish
) -> dict[str, Any]:
    inside = replace(start, token_file=f"{TOKEN_FOLDER}/token")
    command = [*agent_argv(inside), *node_argv("$(POD_NAME)", "$(NODE_NAME)")]
    volume = (
        {"emptyDir": {}}
        if options.claim == "none"
        else {"persistentVolumeClaim": {"claimName": options.claim}}
    )
    container: dict[str, Any] = {
        "name": "agent",
        "image": options.image,
        "command": command,
        "env": [_from_pod("POD_NAME", "metadata.name"), _from_pod("NODE_NAME", "spec.nodeName")],
        "volumeMounts": [
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
            {"name": "run", "mountPath": start.run_dir},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if options.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(sizes.procs_per_node)}}
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,  # an agent asks nothing of Kubernetes
        "terminationGracePeriodSeconds": options.grace_s,
        **(network if options.host_network else {}),
        "affinity": _affinity(options, wish),
        "containers": [container],
        "volumes": [
            {
                "name": "token",
                "secret": {"secretName": f"{options.name}-{run}", "defaultMode": 0o400},
            },
            {"name": "run", **volume},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _affinity(options: KubernetesOptions, wish: Wish) -> dict[str, Any]:
    alone = {"labelSelector": {"matchLabels": {JOB: options.name}}, "topologyKey": HOST}
    affinity: dict[str, Any] = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}
    }
    node: dict[str, Any] = {}
    if wish.avoid:
        terms = {"nodeSelectorTerms": [_term(HOST, "NotIn", sorted(wish.avoid))]}
        node["requiredDuringSchedulingIgnoredDuringExecution"] = terms
    if wish.near and options.switch_label:
        term = _term(options.switch_label, "In", sorted(wish.near))
        node["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": term}
        ]
    return affinity | ({"nodeAffinity": node} if node else {})


def _term(key: str, operator: str, values: Sequence[str]) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def _from_pod(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
