"""All that a person applies for a job: what the driver may do, its address, and the agents. Pure,
but for PyYAML.

The rights are those that `kubernetes_api.py` uses and no more: in its own namespace a Role; over
nodes, which belong to no namespace, a ClusterRole, and only with the options that need one. A
driver's pod has the label DRIVER and the service account `NAME-driver`; agents have no account.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from megascale.cluster.backends.base import AgentStart, BackendError, Sizes, parse_options
from megascale.cluster.backends.kubernetes_manifests import (
    API,
    DRIVER,
    RENDERED,
    KubernetesOptions,
    jobset,
    jobset_name,
    metadata,
    read_token,
    secret,
)
from megascale.errors import require_extra

_RBAC = "rbac.authorization.k8s.io"


def render(
    start: AgentStart,
    num_nodes: int,
    *,
    procs_per_node: int = 1,
    spares: int = 0,
    options: Mapping[str, Any],
    with_token: bool = False,
) -> str:
    """YAML of rights, Secret, Service and a JobSet of `num_nodes + spares` agents, for kubectl.

    A driver that is started with the same options then takes these agents before it asks for more.
    Without `with_token` the Secret holds a placeholder, because such files end in repositories.
    LaunchError for illegal options; BackendError if the token is wanted and cannot be read.
    """
    parsed = parse_options(KubernetesOptions, "kubernetes", options)
    if num_nodes < 1 or spares < 0 or procs_per_node < 1:
        raise BackendError(
            f"{num_nodes} nodes with {procs_per_node} processes each and {spares} spares; at least "
            "1, 1 and 0 are legal"
        )
    sizes = Sizes(procs_per_node, spares)
    token = read_token(start) if with_token else "replace me by the content of " + start.token_file
    documents = [
        *access(parsed),
        secret(parsed, RENDERED, token),
        service(parsed, start),
        jobset(parsed, RENDERED, jobset_name(parsed, RENDERED), start, num_nodes + spares, sizes),
    ]
    try:
        yaml = import_module("yaml")
    except ModuleNotFoundError:
        raise require_extra("PyYAML", "kubernetes") from None
    text: str = yaml.safe_dump_all(documents, sort_keys=False)
    return text


def access(options: KubernetesOptions) -> list[dict[str, Any]]:
    """ServiceAccount, Role and RoleBinding of the driver; for nodes their cluster-wide kin."""
    name = driver_name(options)
    rules = [
        _rule("", "pods", "list", "watch", "delete"),
        _rule(API.split("/")[0], "jobsets", "create", "list", "delete"),
        _rule("", "secrets", "create", "delete"),
    ]
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(options, RENDERED, name),
    }
    found = [account, *_granted(options, "", name, rules)]
    if options.switch_label or options.taint:
        rule = _rule("", "nodes", "get", *(["patch"] if options.taint else []))
        found += _granted(options, "Cluster", f"{options.namespace}-{name}", [rule])
    return found


def driver_name(options: KubernetesOptions) -> str:
    """Of its account and rights, and of its Service: its address."""
    return f"{options.name}-driver"


def service(options: KubernetesOptions, start: AgentStart) -> dict[str, Any]:
    """The address of a driver that runs as a pod labelled DRIVER: the job's name."""
    port = urlsplit(start.driver_url).port or 80
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options, RENDERED, driver_name(options)),
        "spec": {
            "selector": {DRIVER: options.name},
            "ports": [{"name": "driver", "port": port, "targetPort": port}],
        },
    }


def _rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


def _granted(
    options: KubernetesOptions, scope: str, name: str, rules: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A role and its binding to the driver's account; scope: "" or "Cluster"."""
    about = metadata(options, RENDERED, name)
    if scope:
        del about["namespace"]
    whom = {
        "kind": "ServiceAccount",
        "name": driver_name(options),
        "namespace": options.namespace,
    }
    role = {"apiGroup": _RBAC, "kind": f"{scope}Role", "name": name}
    head = {"apiVersion": f"{_RBAC}/v1"}
    return [
        {**head, "kind": f"{scope}Role", "metadata": about, "rules": rules},
        {
            **head,
            "kind": f"{scope}RoleBinding",
            "metadata": dict(about),
            "subjects": [whom],
            "roleRef": role,
        },
    ]
