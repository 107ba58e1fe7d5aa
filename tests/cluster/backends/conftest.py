"""The backends that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(params=["local", pytest.param("slurm", marks=pytest.mark.full)])
def place(request: pytest.FixtureRequest) -> Harness:
    harness: Harness = request.getfixturevalue(f"{request.param}_place")
    return harness
