"""Budgets of restarts are of a span of steps: a job of weeks does not end by what is long over."""

from __future__ import annotations

import pytest

from megascale.cluster.actions import FinishJob
from tests.cluster.driver.jobs import ByHand
from tests.cluster.driver.test_ladder import exits, training

WINDOW = 100


def fault(hand: ByHand, kind: str, step: int) -> None:
    """A rank fails at `step` and everybody stops."""
    hand.go(exits(hand, 1, 1, kind=kind, message=kind, step=step))
    hand.stopped()
    if hand.phase() == "diagnosing":
        hand.checked()


@pytest.mark.parametrize("kind", ["out_of_memory", "disk_full"])
def test_a_second_one_long_after_the_first_is_a_first_one(kind: str) -> None:
    hand = training(restart_window_steps=WINDOW)
    for step in (10, 110, 210, 310):
        hand.steps(step)
        fault(hand, kind, step)
        assert hand.phase() == "starting", hand.job.report
    assert hand.job.restarts == {kind: 4}
    hand.steps(409)
    fault(hand, kind, 409)
    report = hand.the(FinishJob).report
    assert "less than 100 steps ago (cluster.restart_window_steps)" in report


def test_a_restart_for_another_cause_does_not_make_it_young_again() -> None:
    hand = training(restart_window_steps=WINDOW)
    hand.steps(10)
    fault(hand, "out_of_memory", 10)
    hand.steps(60)
    fault(hand, "signal", 60)
    hand.steps(110)
    fault(hand, "out_of_memory", 110)
    assert hand.phase() == "starting"


def test_steps_that_were_done_before_are_no_progress() -> None:
    hand = training(restart_window_steps=WINDOW)
    hand.steps(500)
    fault(hand, "disk_full", 500)
    hand.steps(450)  # from an older state
    fault(hand, "disk_full", 450)
    assert hand.job.phase == "failed"


def test_the_same_step_again_stops_whatever_the_window() -> None:
    hand = training(restart_window_steps=1)
    hand.steps(10)
    fault(hand, "out_of_memory", 11)
    assert hand.phase() == "starting"
    hand.steps(11)
    fault(hand, "out_of_memory", 11)
    assert "the same fault at the same step 2 times" in hand.the(FinishJob).report


@pytest.mark.parametrize("changes", [{"max_restarts_a_cause": 2}, {"max_restarts": 2}])
def test_all_budgets_are_of_the_window(changes: dict[str, int]) -> None:
    hand = training(restart_window_steps=WINDOW, **changes)
    for step in (10, 60, 210, 260, 410):
        hand.steps(step)
        fault(hand, "signal", step)
        assert hand.phase() == "starting", hand.job.report
    hand.steps(420)
    fault(hand, "signal", 420)
    hand.steps(430)
    fault(hand, "signal", 430)
    assert "2 restarts" in hand.the(FinishJob).report
    assert "within 100 steps (cluster.restart_window_steps)" in hand.the(FinishJob).report
