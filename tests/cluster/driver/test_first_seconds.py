"""What a driver that comes back says in its first seconds: nothing of what is usual then."""

from __future__ import annotations

import logging
from contextlib import suppress

import pytest

from megascale.cluster.driver import refusals
from megascale.cluster.driver.desk import Desk
from megascale.cluster.driver.refusals import RefusedError
from megascale.cluster.driver.silences import silent_nodes
from megascale.cluster.messages import Heartbeat
from megascale.cluster.transitions import NodeSilent
from tests.cluster.driver.test_ladder import training


def test_nobody_is_suspected_while_agents_find_the_new_driver() -> None:
    job = training().job
    lost_s = job.policy.cluster.lost_after_s
    assert silent_nodes(job, {"n1": 3.5}) == [NodeSilent("n1", 3.5)]
    assert silent_nodes(job, {"n1": 3.5}, readopting=True) == []
    assert silent_nodes(job, {"n1": lost_s}, readopting=True) == [NodeSilent("n1", lost_s)]


def test_agents_that_have_to_join_again_are_told_of_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(training().job)

    def unknown() -> list[str]:
        base = {"node": "n1", "incarnation": "i", "epoch": 1, "sequence": 1, "unix_ns": 1}
        desk.heartbeat(Heartbeat.model_validate(base))
        with suppress(RefusedError):
            desk.commands_after("n1", "i", 0)
        return [one.getMessage() for one in caplog.records]

    caplog.set_level(logging.INFO)
    assert unknown() == []
    monkeypatch.setattr(refusals, "FIRST_S", 0.0)
    first, second = unknown()
    assert first.startswith("refused: unknown incarnation: n1 (2 times)")
    assert second.startswith("refused: HTTP 404: n1 has not joined")
