"""What is rendered for Kubernetes: the driver's rights against the calls that a job makes, and the
command line. Against a stand-in for the API."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from megascale.cluster.backends import make_backend
from megascale.cluster.backends.base import AgentStart
from tests.cluster.backends.fake_kubernetes_api import KubernetesHarness
from tests.cluster.backends.test_kubernetes import OPTIONS, documents, pod_of, start
from tools.blocks import ROOT

__all__ = ["start"]  # a fixture
pytestmark = pytest.mark.full


def test_the_driver_may_do_what_it_does_and_agents_nothing(
    kubernetes_place: KubernetesHarness,
) -> None:
    """Every call that a job makes is in the rights that are rendered, and no right is unused."""
    place = kubernetes_place
    options = {**place.options, "taint": True}
    backend = make_backend("kubernetes", place.start, options=options)
    lost, kept = backend.allocate(2)
    backend.watch()
    backend.evict(lost.name, "a test", block=True)
    backend.replenish(1)
    assert make_backend("kubernetes", place.start, options=options).adopt([kept]) == [kept]
    make_backend("kubernetes", place.start, options=options).close()
    verbs = {
        "GET pods": ("list", "watch"),
        "GET jobsets": ("list",),
        "GET nodes": ("get",),
        **{f"POST {kind}": ("create",) for kind in ("jobsets", "secrets")},
        **{f"DELETE {kind}": ("delete",) for kind in ("pods", "jobsets", "secrets")},
        "PATCH nodes": ("patch",),
    }
    done = {(call.split()[1], verb) for call in place.cluster.calls for verb in verbs[call]}
    found = documents(place.start, options=options)
    rules = {scope: found[f"{scope}Role"]["rules"] for scope in ("", "Cluster")}
    granted = {
        (resource, verb)
        for each in rules.values()
        for rule in each
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == done
    groups = {r: rule["apiGroups"] for rule in rules[""] for r in rule["resources"]}
    assert groups == {"pods": [""], "jobsets": ["jobset.x-k8s.io"], "secrets": [""]}
    assert pod_of(found)["automountServiceAccountToken"] is False


def test_rights_are_bound_to_the_drivers_account(start: AgentStart) -> None:
    found = documents(start, options={**OPTIONS, "switch_label": "leaf"})
    account = found["ServiceAccount"]["metadata"]
    assert (account["name"], account["namespace"]) == ("gpt-driver", "train")
    for scope in ("", "Cluster"):
        role, binding = found[f"{scope}Role"], found[f"{scope}RoleBinding"]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["roleRef"]["kind"] == role["kind"]
        (whom,) = binding["subjects"]
        assert (whom["name"], whom["namespace"]) == ("gpt-driver", "train")
        assert ("namespace" in role["metadata"]) is (scope == "")
    assert found["ClusterRole"]["rules"][0]["verbs"] == ["get"], (
        "nodes are changed for taints alone"
    )
    assert "ClusterRole" not in documents(start), "nobody asks for nodes"


# ---------------------------------------------------------------- megascale run --render


SET = [word for key, value in OPTIONS.items() for word in ("--backend-set", f"{key}={value}")]
RENDER = ["run", "--backend", "kubernetes", "--render", "--nodes", "2", *SET]


def cli(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "megascale", *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_run_is_rendered_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/config")
    yaml = import_module("yaml")
    recipe = str(ROOT / "recipes" / "first-run.toml")
    words = ["--set", "job.run_dir=/runs/mine", "--procs-per-node", "2", "--spares", "1"]
    code, text, errors = cli(*RENDER, *words, "--set", "cluster.spares=3", "--port", "9", recipe)
    assert code == 0, errors
    found = {document["kind"]: document for document in yaml.safe_load_all(text)}
    assert {"ServiceAccount", "Role", "RoleBinding", "Secret", "Service", "JobSet"} == {*found}
    (container,) = pod_of(found)["containers"]
    command = container["command"]
    assert command[:3] == ["python3", "-m", "megascale.cluster.agent"]
    assert command[command.index("--driver") + 1] == "http://gpt-driver:9"
    assert command[command.index("--run-dir") + 1] == "/runs/mine"
    (job,) = found["JobSet"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == 3
    assert not Path("/runs/mine").exists()
    code, script, errors = cli(*RENDER, "--script", "--run-dir", "/runs/mine", "--", "train.py")
    assert code == 0, errors
    assert "kind: JobSet" in script


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--render", "RECIPE"], "only kubernetes has documents to write"),
        ([*RENDER, "RECIPE"], "give it from the root: --set job.run_dir=/runs/mine"),
        ([*RENDER, "--backend-set", "claims=a", "RECIPE"], "did you mean 'claim'"),
        ([*RENDER, "one.toml", "two.toml"], "a recipe is wanted"),
    ],
)
def test_what_cannot_be_rendered(words: list[str], says: str) -> None:
    recipe = str(ROOT / "recipes" / "first-run.toml")
    code, text, errors = cli(*[recipe if word == "RECIPE" else word for word in words])
    assert code != 0
    assert text == ""
    assert says in " ".join(errors.split())
