"""What the results of commands become."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.cluster.driver.results import event_of
from megascale.cluster.messages import Command, Result, RunSelfCheck
from megascale.cluster.transitions import CheckDone
from tests.cluster.driver.jobs import ByHand, policy

CHECKS = [
    {"name": "host", "ok": True, "reason": ""},
    {"name": "gpus", "ok": None, "reason": "no GPU"},
    {"name": "replay", "ok": False, "reason": "silent corruption"},
]


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        ({"checks": CHECKS}, ("replay: silent corruption",)),
        ({}, ("late",)),
        ({"checks": 3}, ("late",)),
    ],
)
def test_a_failed_check_is_told_by_name(detail: dict[str, Any], told: tuple[str, ...]) -> None:
    job = ByHand(policy(1)).job
    command = Command(epoch=0, sequence=1, order=RunSelfCheck())
    result = Result(
        node="n0", incarnation="i", epoch=0, sequence=1, ok=False, reason="late", detail=detail
    )
    event = event_of(result, command, job)
    assert isinstance(event, CheckDone)
    assert (event.ok, event.failures) == (False, told)
