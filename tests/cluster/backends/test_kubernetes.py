"""What only Kubernetes has: documents, watches, forced removal. Against a stand-in for the API."""

from __future__ import annotations

import base64
import inspect
import json
import logging
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.cluster.backends import make_backend
from megascale.cluster.backends.base import AgentStart, Backend, BackendError
from megascale.cluster.backends.kubernetes_render import render
from megascale.env import free_port
from megascale.errors import LaunchError
from tests.cluster.backends.fake_kubernetes_api import KubernetesHarness
from tests.cluster.backends.harness import TOKEN, LocalHarness, wait_for, wait_until

pytestmark = pytest.mark.full
OPTIONS = {"image": "megascale:1", "claim": "runs", "name": "gpt", "namespace": "train"}


def kubernetes(place: KubernetesHarness, **options: Any) -> Backend:
    return make_backend("kubernetes", place.start, options={**place.options, **options})


def documents(start: AgentStart, **arguments: Any) -> dict[str, dict[str, Any]]:
    yaml = import_module("yaml")
    given = {"num_nodes": 3, "options": OPTIONS, **arguments}
    return {found["kind"]: found for found in yaml.safe_load_all(render(start, **given))}


@pytest.fixture
def start(tmp_path: Any) -> AgentStart:
    return replace(LocalHarness(tmp_path).start, driver_url="http://gpt-driver:8123")


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    (job,) = found["JobSet"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


def test_documents_are_what_the_client_knows(start: AgentStart) -> None:
    """Each is read by the client's class and written again: a misspelt field would get lost."""
    client = import_module("kubernetes.client")
    options = {**OPTIONS, "host_network": True, "switch_label": "leaf"}
    found = documents(start, options=options, spares=1, procs_per_node=8)
    (job,) = found["JobSet"]["spec"]["replicatedJobs"]
    api = client.ApiClient()
    kinds = [kind for kind in found if kind != "JobSet"]
    assert len(kinds) == 7
    for kind, document in (
        *((f"V1{kind}", found[kind]) for kind in kinds),
        ("V1JobTemplateSpec", job["template"]),
    ):
        read = _read(api, json.dumps(document), kind)
        assert api.sanitize_for_serialization(read) == document


def _read(api: Any, text: str, kind: str) -> Any:
    """The client's class of a document; before version 37 it took a whole response."""
    if len(inspect.signature(api.deserialize).parameters) == 3:
        return api.deserialize(text, kind, "application/json")
    return api.deserialize(SimpleNamespace(data=text), kind)


def test_the_jobset_leaves_all_decisions_to_the_driver(start: AgentStart) -> None:
    found = documents(start, num_nodes=3, spares=2)
    jobset = found["JobSet"]
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0}
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["completions"], spec["parallelism"]) == (5, 5)
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (0, 5)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_pod_reserves_the_gpus_and_knows_its_driver(start: AgentStart) -> None:
    pod = pod_of(documents(start, procs_per_node=8))
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    command = container["command"]
    assert command[command.index("--driver") + 1] == start.driver_url
    assert command[command.index("--token-file") + 1] == "/var/run/megascale/token"
    assert command[command.index("--node") + 1] == "$(POD_NAME)"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["run"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes["token"]["secret"]["secretName"] == "gpt-rendered"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["run"] == start.run_dir
    service = documents(start)["Service"]
    assert service["metadata"]["name"] == "gpt-driver"
    assert service["spec"]["ports"][0]["port"] == 8123


def test_the_token_is_written_only_if_asked_for(start: AgentStart) -> None:
    plain = documents(start)["Secret"]["data"]["token"]
    assert base64.b64decode(plain).decode().startswith("replace me by the content of ")
    assert TOKEN not in render(start, 1, options=OPTIONS)
    asked = documents(start, with_token=True)["Secret"]["data"]["token"]
    assert base64.b64decode(asked).decode() == TOKEN


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"image": ""}, "kubernetes.image: String should have at least 1 character"),
        ({"name": "GPT_3"}, "kubernetes.name: String should match pattern"),
        ({"claims": "a"}, "unknown key 'claims'; did you mean 'claim'"),
        ({"grace_s": -1}, "kubernetes.grace_s"),
    ],
)
def test_bad_options_are_refused(start: AgentStart, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        render(start, 1, options={**OPTIONS, **changed})


def test_no_node_is_refused(start: AgentStart) -> None:
    with pytest.raises(LaunchError, match="0 nodes with 1 processes each and 0 spares"):
        render(start, 0, options=OPTIONS)


def test_an_api_that_does_not_answer_is_an_error_of_one_line(start: AgentStart) -> None:
    options = {**OPTIONS, "api": f"http://127.0.0.1:{free_port()}"}
    backend = make_backend("kubernetes", start, options=options)
    with pytest.raises(BackendError, match="Kubernetes did not answer to list pods"):
        backend.allocate(1)


def test_no_kubeconfig_is_said(start: AgentStart, monkeypatch: pytest.MonkeyPatch) -> None:
    config = import_module("kubernetes.config.kube_config")
    monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", "/no/such/config")
    with pytest.raises(BackendError, match="no API server is known"):
        make_backend("kubernetes", start, options=OPTIONS)


def test_applied_agents_are_taken_before_new_ones_are_asked_for(
    kubernetes_place: KubernetesHarness,
) -> None:
    place = kubernetes_place
    yaml = import_module("yaml")
    text = render(place.start, 2, spares=1, options=place.options, with_token=True)
    with place.cluster.lock:
        for document in yaml.safe_load_all(text):
            if document["kind"] in ("Secret", "JobSet"):
                place.cluster.create(document["kind"].lower() + "s", document)
    wait_until(lambda: len(place.running()) == 3, "the applied agents")
    backend = kubernetes(place)
    machines = backend.allocate(2)
    (spare,) = backend.replenish(1)
    assert len(place.running()) == 3
    assert "POST jobsets" not in place.cluster.calls
    backend.evict(spare.name, "a test", block=True)
    (more,) = backend.replenish(1)
    assert place.cluster.calls.count("POST jobsets") == 1
    assert more.host not in {spare.host, *(machine.host for machine in machines)}

    after = kubernetes(place)
    assert len(after.adopt([machines[0], more])) == 2
    assert len(place.running()) == 2, "a machine that was given and not adopted is ended"
    after.close()
    assert place.running() == set()
    assert list(place.cluster.kinds["jobsets"]) == []


def test_a_watch_that_is_too_old_begins_anew(kubernetes_place: KubernetesHarness) -> None:
    place = kubernetes_place
    backend = kubernetes(place)
    lost, kept = backend.allocate(2)
    assert backend.watch() == []
    place.said(kept.name)
    with place.cluster.lock:
        place.cluster.delete("pods", place.cluster.kinds["pods"][lost.name], 0)
        place.cluster.log.clear()
    place.cluster.forget()
    (event,) = backend.watch()
    assert (event.name, event.kind) == (lost.name, "gone")
    assert backend.watch() == []
    place.kill(kept)
    (event,) = wait_for(backend.watch, "the event, through a watch again")
    assert (event.name, event.kind) == (kept.name, "gone")
    assert "exit code 9" in event.reason
    backend.close()


def test_what_did_not_start_is_taken_back(kubernetes_place: KubernetesHarness) -> None:
    place = kubernetes_place
    backend = kubernetes(place)
    machines = backend.allocate(place.hosts - 1)
    more = backend.replenish(3)
    assert len(more) == 1
    names = {machine.name for machine in machines + more}
    assert set(place.cluster.kinds["pods"]) == names, "none waits for a node"
    assert len(place.cluster.kinds["jobsets"]) == 2
    backend.close()


def change_status(place: KubernetesHarness, name: str, **condition: str) -> None:
    with place.cluster.lock:
        pod = place.cluster.kinds["pods"][name]
        conditions = {c["type"]: c for c in pod["status"]["conditions"]}
        conditions[condition["type"]] = condition
        pod["status"]["conditions"] = list(conditions.values())
        place.cluster.put("pods", pod)


def test_a_pod_that_is_not_ready_is_down_and_then_up(kubernetes_place: KubernetesHarness) -> None:
    place = kubernetes_place
    backend = kubernetes(place)
    (machine,) = backend.allocate(1)
    assert backend.watch() == []
    change_status(place, machine.name, type="Ready", status="False", message="node is unreachable")
    (down,) = backend.watch()
    assert (down.kind, down.reason) == ("down", "its pod is not ready: node is unreachable")
    change_status(place, machine.name, type="Ready", status="True")
    (back,) = backend.watch()
    assert back.kind == "up"
    backend.close()


def test_a_pod_that_kubernetes_takes_is_preempted(kubernetes_place: KubernetesHarness) -> None:
    place = kubernetes_place
    backend = kubernetes(place)
    (machine,) = backend.allocate(1)
    said = {"type": "DisruptionTarget", "status": "True", "message": "a higher priority came"}
    change_status(place, machine.name, **said)
    with place.cluster.lock:
        place.cluster.delete("pods", place.cluster.kinds["pods"][machine.name], None)
    (event,) = wait_for(backend.watch, "the event")
    assert (event.name, event.kind) == (machine.name, "preempted")
    assert "a higher priority came" in event.reason
    assert backend.watch() == []
    backend.close()


def test_a_pod_of_a_node_that_is_cut_off_is_removed_by_force_and_its_host_blocked(
    kubernetes_place: KubernetesHarness,
) -> None:
    place = kubernetes_place
    backend = kubernetes(place, kill_deadline_s=0.5)
    machines = backend.allocate(place.hosts)
    place.cluster.cut.add(machines[0].host)
    backend.evict(machines[0].name, "not heard", block=False)
    assert machines[0].name not in place.cluster.kinds["pods"]
    (event,) = backend.watch()
    assert (event.name, event.kind) == (machines[0].name, "gone")
    assert f"removed by force; {machines[0].host} is blocked" in event.reason
    assert backend.replenish(1) == []
    place.cluster.cut.clear()
    backend.close()


@pytest.mark.parametrize("taint", [False, True])
def test_a_blocked_node_is_tainted_where_that_is_wished(
    kubernetes_place: KubernetesHarness, taint: bool
) -> None:
    place = kubernetes_place
    backend = kubernetes(place, taint=taint)
    (machine,) = backend.allocate(1)
    backend.evict(machine.name, "bad memory", block=True)
    node = place.cluster.kinds["nodes"][machine.host]
    wanted = [{"key": "megascale.dev/blocked", "value": "", "effect": "NoSchedule"}]
    assert node["spec"].get("taints") == (wanted if taint else None)
    if taint:
        assert node["metadata"]["annotations"]["megascale.dev/blocked"] == "bad memory"
    assert machine.host not in {m.host for m in backend.replenish(place.hosts)}
    backend.close()


def test_a_taint_that_is_not_permitted_is_said_and_the_eviction_goes_on(
    kubernetes_place: KubernetesHarness, caplog: pytest.LogCaptureFixture
) -> None:
    place = kubernetes_place
    backend = kubernetes(place, taint=True)
    (machine,) = backend.allocate(1)
    place.cluster.refuse["PATCH nodes"] = 403
    with caplog.at_level(logging.WARNING):
        backend.evict(machine.name, "bad memory", block=True)
    assert f"{machine.host} is kept out of this job only, not tainted" in caplog.text
    assert place.cluster.kinds["pods"] == {}
    backend.close()


def test_what_is_refused_is_said_and_nothing_is_left(kubernetes_place: KubernetesHarness) -> None:
    place = kubernetes_place
    backend = kubernetes(place)
    place.cluster.refuse["POST jobsets"] = 403
    with pytest.raises(BackendError, match="refused to create JobSet: 403"):
        backend.allocate(1)
    backend.close()
    assert place.leftovers() == []


def test_the_token_is_in_the_secret_alone(kubernetes_place: KubernetesHarness) -> None:
    place = kubernetes_place
    backend = kubernetes(place)
    (machine,) = backend.allocate(1)
    assert place.said(machine.name)["token"] == TOKEN
    kinds = place.cluster.kinds
    (secret,) = kinds["secrets"].values()
    assert base64.b64decode(secret["data"]["token"]).decode() == TOKEN
    assert TOKEN not in str(kinds["pods"]) + str(kinds["jobsets"])
    backend.close()
