"""An incident: one thing that went wrong, from its first sign to its only end.

At most one is open a cause; a second sign of the same joins it. It is closed by exactly one
`Closed` action: by the first step of a later epoch, by silence of its cause, by a node that is
heard again, or by the end of the job, as `ends` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ends = Literal["step", "quiet", "heard"]


@dataclass(frozen=True)
class Incident:
    """epoch: of the job when it was opened. opened_s: of the job's clock."""

    number: int
    cause: str
    opened_s: float
    epoch: int
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    step: int | None = None
    text: str = ""
    ends: Ends = "step"
    quiet_after_s: float | None = None
