"""Idle time of stages: measured, predicted, and the part of a slow stage."""

from __future__ import annotations

import pytest

from megascale.plan.actions import PipelineShape
from megascale.telemetry.diagnose.bubbles import idle, predicted
from megascale.train.waterfall.bubble import idle_ns


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)],
)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_the_formulas_are_the_schedules(
    schedule: str, chunks: int, stages: int, micro_batches: int
) -> None:
    """Against the simulation of the schedule's own actions, backward twice as long as forward."""
    shape = PipelineShape(stages, chunks, micro_batches)
    durations = {
        (name, chunk, m): took
        for chunk in range(shape.num_chunks)
        for m in range(micro_batches)
        for name, took in (("forward", 100), ("backward", 200))
    }
    busy = 300 * chunks * micro_batches
    expected = idle_ns(schedule, shape, durations)[0] / busy
    assert predicted(schedule, stages, chunks, micro_batches) == pytest.approx(expected)


def test_zero_bubble_has_a_third() -> None:
    shape = PipelineShape(4, 1, 8)
    durations = {
        (name, chunk, m): 100
        for chunk in range(4)
        for m in range(8)
        for name in ("forward", "backward_input", "backward_weight")
    }
    expected = idle_ns("zb_h1", shape, durations)[0] / 2400
    assert predicted("zb_h1", 4, 1, 8) == pytest.approx(expected)
    assert predicted("unheard", 4, 1, 8) is None


def test_idle_and_imbalance() -> None:
    even = {(1, 0): {0: (0.0, 9.0, 8.0), 1: (1.0, 10.0, 8.0)}}
    found = idle(even)
    assert found is not None
    assert (found.idle, found.bubble, found.imbalance) == (0.25, 0.25, 0.0)
    uneven = {(1, 0): {0: (0.0, 9.0, 6.0), 1: (1.0, 10.0, 8.0)}}
    found = idle(uneven)
    assert found is not None
    assert found.bubble == 0.25
    assert found.imbalance == pytest.approx(1 / 7)
    assert found.idle == pytest.approx(10 / 7 - 1)
    assert found.slowest == 1


def test_pipelines_without_all_stages_say_nothing() -> None:
    assert idle({}) is None
    assert idle({(1, 0): {0: (0.0, 1.0, 1.0)}}) is None
