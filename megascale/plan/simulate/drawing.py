"""A simulated step as lines of letters, one a stage: each column is what fills most of its time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megascale.plan.simulate.timeline import DATA_LANE, SimulatedSpan, Timeline

WIDTH = 100

_LETTERS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "B",
    "backward_weight": "W",
    "head": "H",
    "optimizer": "U",
    "load": "L",
    "fixed": "x",
}
_IDLE, _COMMUNICATES = ".", "~"

LEGEND = (
    "(F forward, B backward, W weight gradients, H shared head, U update, L load, x fixed costs;",
    "idle: ~ while gradients are reduced or parameters gathered, . else)",
)


def draw(timeline: Timeline, width: int = WIDTH) -> list[str]:
    """From the beginning of the step to its end."""
    digits = len(str(timeline.num_stages - 1))
    ends = f"0 s{f'{timeline.step_s:.3f} s':>{width - 3}}"
    stages = (
        f"  {stage:>{digits}} {_line(timeline, stage, width)}"
        for stage in range(timeline.num_stages)
    )
    return [" " * (digits + 3) + ends, *stages]


def _line(timeline: Timeline, stage: int, width: int) -> str:
    kinds = [*dict.fromkeys(_LETTERS.values())]
    filled_WK = np.zeros((width, len(kinds)))
    reduced_W = np.zeros(width)
    for span in timeline.spans(stage):
        if span.kind in _LETTERS:
            _fill(filled_WK[:, kinds.index(_LETTERS[span.kind])], span, timeline.step_s)
        elif span.lane == DATA_LANE:
            _fill(reduced_W, span, timeline.step_s)
    letters = []
    for column, filled_K in enumerate(filled_WK):
        most = int(filled_K.argmax())
        if filled_K.sum() >= 0.5:
            letters.append(kinds[most])
        else:
            letters.append(_COMMUNICATES if reduced_W[column] >= 0.5 else _IDLE)
    return "".join(letters)


def _fill(columns_W: NDArray[np.float64], span: SimulatedSpan, step_s: float) -> None:
    """Add to each column the share of it that `span` covers."""
    width = len(columns_W)
    begin, end = span.start_s / step_s * width, span.end_s / step_s * width
    first, last = int(begin), min(int(end), width - 1)
    if first >= last:
        columns_W[min(first, width - 1)] += end - begin
        return
    columns_W[first] += first + 1 - begin
    columns_W[first + 1 : last] += 1.0
    columns_W[last] += end - last
