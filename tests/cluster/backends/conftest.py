"""The backends that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.backends.harness import Harness, LocalHarness


@pytest.fixture(params=["local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    harness = LocalHarness(tmp_path)
    yield harness
    harness.end()
