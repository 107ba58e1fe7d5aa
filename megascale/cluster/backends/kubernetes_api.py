"""The few calls to an API server that the backend makes, through the official client.

The client is imported when it is used: it costs a second, and the other backends do without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from megascale.cluster.backends.base import BackendError
from megascale.cluster.backends.kubernetes_manifests import (
    API,
    BLOCKED_TAINT,
    KubernetesOptions,
)
from megascale.errors import require_extra

REQUEST_S = 30.0
WATCH_S = 1
_GROUP, _VERSION = API.split("/")


@dataclass(frozen=True)
class Pod:
    """An agent's pod. `words`: why it is as it is, where Kubernetes says."""

    name: str
    host: str
    run: str
    jobset: str
    phase: str
    ready: bool
    leaving: bool
    preempted: bool
    words: str

    @property
    def runs(self) -> bool:
        return self.phase == "Running" and not self.leaving


class VersionTooOldError(Exception):
    """The server has forgotten the resource version: list anew."""


class Api:
    """Bound to one namespace. Every method raises BackendError with the server's words."""

    def __init__(self, options: KubernetesOptions) -> None:
        try:
            self._client = import_module("kubernetes.client")
            self._config = import_module("kubernetes.config")
            self._watch = import_module("kubernetes.watch")
        except ModuleNotFoundError:
            raise require_extra("kubernetes", "kubernetes") from None
        self._namespace = options.namespace
        configuration = self._configuration(options)
        connection = self._client.ApiClient(configuration)
        self._core = self._client.CoreV1Api(connection)
        self._custom = self._client.CustomObjectsApi(connection)

    def _configuration(self, options: KubernetesOptions) -> Any:
        configuration = self._client.Configuration()
        if options.api:
            configuration.host = options.api
            return configuration
        missing = self._config.ConfigException
        try:
            self._config.load_incluster_config(configuration)
        except missing:
            try:
                self._config.load_kube_config(
                    context=options.context or None, client_configuration=configuration
                )
            except missing as error:
                raise BackendError(
                    f"no API server is known: {error}; run in a pod with a service account, give a "
                    "kubeconfig (KUBECONFIG), or set the option api"
                ) from None
        return configuration

    def pods(self, selector: str) -> tuple[dict[str, Pod], str]:
        """(pods by name, resource version of the list)."""
        with self._called("list pods"):
            found = self._core.list_namespaced_pod(
                self._namespace, label_selector=selector, _request_timeout=REQUEST_S
            )
        return {item.metadata.name: _pod(item) for item in found.items}, (
            found.metadata.resource_version
        )

    def changes(
        self, selector: str, version: str
    ) -> tuple[list[tuple[Literal["there", "deleted"], Pod]], str]:
        """What happened to pods since `version`, and the new version; waits WATCH_S.

        VersionTooOldError where the server has forgotten.
        """
        changes: list[tuple[Literal["there", "deleted"], Pod]] = []
        with self._called("watch pods"):
            for event in self._watch.Watch().stream(
                self._core.list_namespaced_pod,
                self._namespace,
                label_selector=selector,
                resource_version=version,
                timeout_seconds=WATCH_S,
                allow_watch_bookmarks=True,
                _request_timeout=REQUEST_S,
            ):
                version = event["raw_object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    kind: Literal["there", "deleted"] = (
                        "deleted" if event["type"] == "DELETED" else "there"
                    )
                    changes.append((kind, _pod(event["object"])))
        return changes, version

    def delete_pod(self, name: str, grace_s: int) -> None:
        with self._called("delete pod", missing_ok=True):
            self._core.delete_namespaced_pod(
                name, self._namespace, grace_period_seconds=grace_s, _request_timeout=REQUEST_S
            )

    def node_labels(self, host: str) -> dict[str, str]:
        with self._called("read node"):
            node = self._core.read_node(host, _request_timeout=REQUEST_S)
        return dict(node.metadata.labels or {})

    def taint(self, host: str, reason: str) -> None:
        """Add the taint; one that is there stays. The list is replaced whole, so it is read first,
        and the version makes a change of somebody else in between an error."""
        with self._called("taint node"):
            node = self._core.read_node(host, _request_timeout=REQUEST_S)
            taints = [
                {"key": t.key, "value": t.value, "effect": t.effect} for t in node.spec.taints or []
            ]
            if any(taint["key"] == BLOCKED_TAINT for taint in taints):
                return
            taints.append({"key": BLOCKED_TAINT, "value": "", "effect": "NoSchedule"})
            body = {
                "metadata": {
                    "resourceVersion": node.metadata.resource_version,
                    "annotations": {BLOCKED_TAINT: reason},
                },
                "spec": {"taints": taints},
            }
            self._core.patch_node(host, body, _request_timeout=REQUEST_S)

    def create_secret(self, body: dict[str, Any]) -> None:
        with self._called("create secret", there_ok=True):
            self._core.create_namespaced_secret(self._namespace, body, _request_timeout=REQUEST_S)

    def delete_secret(self, name: str) -> None:
        with self._called("delete secret", missing_ok=True):
            self._core.delete_namespaced_secret(name, self._namespace, _request_timeout=REQUEST_S)

    def create_jobset(self, body: dict[str, Any]) -> None:
        with self._called("create JobSet"):
            self._custom.create_namespaced_custom_object(
                _GROUP, _VERSION, self._namespace, "jobsets", body, _request_timeout=REQUEST_S
            )

    def jobsets(self, selector: str) -> list[str]:
        with self._called("list JobSets"):
            found = self._custom.list_namespaced_custom_object(
                _GROUP,
                _VERSION,
                self._namespace,
                "jobsets",
                label_selector=selector,
                _request_timeout=REQUEST_S,
            )
        return [item["metadata"]["name"] for item in found["items"]]

    def delete_jobset(self, name: str) -> None:
        with self._called("delete JobSet", missing_ok=True):
            self._custom.delete_namespaced_custom_object(
                _GROUP,
                _VERSION,
                self._namespace,
                "jobsets",
                name,
                propagation_policy="Background",
                _request_timeout=REQUEST_S,
            )

    @contextmanager
    def _called(
        self, what: str, *, missing_ok: bool = False, there_ok: bool = False
    ) -> Iterator[None]:
        network = import_module("urllib3.exceptions").HTTPError
        try:
            yield
        except self._client.ApiException as error:
            if error.status == 410:
                raise VersionTooOldError from None
            if (error.status == 404 and missing_ok) or (error.status == 409 and there_ok):
                return
            raise BackendError(
                f"Kubernetes refused to {what}: {error.status} {error.reason} "
                f"{(error.body or '')[:500]}"
            ) from None
        except network as error:
            raise BackendError(f"Kubernetes did not answer to {what}: {error}") from None


def _pod(item: Any) -> Pod:
    """From the client's V1Pod."""
    conditions = {c.type: c for c in item.status.conditions or []}
    ready, placed = conditions.get("Ready"), conditions.get("PodScheduled")
    disrupted = conditions.get("DisruptionTarget")
    ended = [
        f"{state.state.terminated.reason or 'ended'}, exit code {state.state.terminated.exit_code}"
        for state in item.status.container_statuses or []
        if state.state and state.state.terminated
    ]
    said = [item.status.reason, item.status.message, *ended]
    said += [c.message for c in (disrupted, placed, ready) if c and c.message]
    labels = item.metadata.labels or {}
    return Pod(
        name=item.metadata.name,
        host=item.spec.node_name or "",
        run=labels.get("megascale.dev/run", ""),
        jobset=labels.get("jobset.sigs.k8s.io/jobset-name", ""),
        phase=item.status.phase or "",
        ready=ready is None or ready.status != "False",
        leaving=item.metadata.deletion_timestamp is not None,
        preempted=disrupted is not None and disrupted.status == "True",
        words="; ".join(text for text in said if text),
    )
