"""A simulated step as lines of letters, one a stage.

A column is a hundredth of the step, longer than a compute where there are many: letters come as
often as what they stand for takes time, each column showing what is most overdue.
"""

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
_KINDS = (*dict.fromkeys(_LETTERS.values()), "~", ".")  # the last two: idle

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
    filled_KW = np.zeros((len(_KINDS), width))
    reduced_W = np.zeros(width)
    for span in timeline.spans(stage):
        if span.kind in _LETTERS:
            _fill(filled_KW[_KINDS.index(_LETTERS[span.kind])], span, timeline.step_s)
        elif span.lane == DATA_LANE:
            _fill(reduced_W, span, timeline.step_s)
    idle_W = np.clip(1.0 - filled_KW.sum(axis=0), 0.0, 1.0)
    filled_KW[-2] = np.minimum(idle_W, reduced_W)
    filled_KW[-1] = idle_W - filled_KW[-2]
    owed_K = np.zeros(len(_KINDS))
    letters = []
    for filled_K in filled_KW.T:
        owed_K += filled_K
        shown = int(np.where(filled_K > 0.0, owed_K, -np.inf).argmax())
        owed_K[shown] -= 1.0
        letters.append(_KINDS[shown])
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
