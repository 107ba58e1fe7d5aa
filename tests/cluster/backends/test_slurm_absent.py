"""What is said where Slurm's commands are and its configuration is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cluster.backends import check_backend
from megascale.cluster.backends.base import BackendError

UNSET = """#!/bin/sh
echo "squeue: error: fetch_config: DNS SRV lookup failed" >&2
echo "squeue: fatal: Could not establish a configuration source" >&2
exit 1
"""


def test_without_configuration_nothing_starts_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "squeue", "sinfo"):
        (tmp_path / name).write_text(UNSET)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(BackendError, match=r"not set up on this machine .*; squeue: fatal") as told:
        check_backend("slurm", num_nodes=2)
    assert "\n" not in str(told.value)
    assert "another backend" in str(told.value)
