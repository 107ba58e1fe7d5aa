"""What counts as a false loss: nodes that were lost and ranks that were started again, no flap."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.false_losses import _row, count
from megascale.cluster.chaos.observe import Journal
from megascale.cluster.transitions import CheckDone, CommandDone, NodeHeard, NodeSilent
from tests.cluster.chaos.test_judge import Watched


def test_a_flap_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Watched(tmp_path, monkeypatch)
    assert count(job.turns()) == {"lost": 0, "restarts": 0, "flaps": 0, "incidents": 0}
    job.go(NodeSilent("n1", 3.0))
    job.go(NodeHeard("n1"))
    assert count(job.turns()) == {"lost": 0, "restarts": 0, "flaps": 1, "incidents": 0}
    read = Journal(job.journal.path)
    read.read()
    row = _row(read, 10.0, Namespace(seconds=10.0, spinners=0))
    assert (row["value"], row["flaps"], row["met"]) == (0, 1, True)


def test_a_node_that_was_given_up_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Watched(tmp_path, monkeypatch)
    job.go(NodeSilent("n1", 3.0))
    job.go(NodeSilent("n1", 60.0))
    job.go(CommandDone("n0", "stop", job.hand.job.epoch))
    job.go(CheckDone("n0", ok=True))
    assert count(job.turns()) == {"lost": 1, "restarts": 1, "flaps": 0, "incidents": 2}
