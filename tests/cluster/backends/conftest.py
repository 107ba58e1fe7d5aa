"""The backends that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.backends.fake_kubernetes import FakeCluster
from tests.cluster.backends.fake_kubernetes_api import KubernetesHarness, serving
from tests.cluster.backends.harness import Harness, LocalHarness
from tests.cluster.backends.slurm_cluster import Cluster, SlurmHarness, running_cluster, why_not


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm_place(
    slurm_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmHarness]:
    harness = SlurmHarness(tmp_path, slurm_cluster, monkeypatch)
    yield harness
    harness.end()


@pytest.fixture
def local_place(tmp_path: Path) -> Iterator[LocalHarness]:
    harness = LocalHarness(tmp_path)
    yield harness
    harness.backend().close()
    harness.end()


@pytest.fixture
def kubernetes_place(tmp_path: Path) -> Iterator[KubernetesHarness]:
    switch_of = {f"worker{i}": f"leaf{i // 3}" for i in range(Harness.hosts)}
    cluster = FakeCluster(tmp_path / "pods", KubernetesHarness.switch_label, switch_of)
    cluster.folder.mkdir()
    with serving(cluster) as url:
        harness = KubernetesHarness(tmp_path, cluster, url)
        yield harness
    harness.end()


@pytest.fixture(
    params=[
        "local",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("kubernetes", "slurm")),
    ]
)
def place(request: pytest.FixtureRequest) -> Harness:
    harness: Harness = request.getfixturevalue(f"{request.param}_place")
    return harness
