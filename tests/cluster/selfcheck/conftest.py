"""Each test here may ask what it left behind."""

from __future__ import annotations

import pytest

from tests.cluster.selfcheck.alive import begin


@pytest.fixture(autouse=True)
def _begin() -> None:
    begin()
