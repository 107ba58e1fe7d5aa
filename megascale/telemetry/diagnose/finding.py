"""What a detector says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One fault, or the suspicion of one.

    kind      what is wrong, as the incident will be called: "hang", "straggler", "nonfinite", ...
    ranks     global ranks that are guilty, never those that only wait for them
    evidence  the numbers that show it, by name; JSON values
    step      where it was seen, if it belongs to one
    group     the smallest parallel group that covers `ranks`, such as "tensor", "data", "pipeline"
              or "world", where the detector looks for one
    certain   True: act on it; False: an alert, which needs more of the same
    """

    kind: str
    ranks: tuple[int, ...]
    evidence: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    group: str | None = None
    certain: bool = True
