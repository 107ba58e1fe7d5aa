"""Which group, and which settings, a run's checkpoints are agreed on with."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megascale.config import CommConfig, RunConfig
from megascale.train.control_groups import control_group


def test_the_control_group_has_the_deadline_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "new_group", made.update)
    config = RunConfig(comm=CommConfig(timeout_s=1234.0))
    control_group(SimpleNamespace(config=config, mesh=SimpleNamespace(world_size=2)))  # type: ignore[arg-type]
    assert made == {"backend": "gloo", "timeout": timedelta(seconds=1234.0)}
