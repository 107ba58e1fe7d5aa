"""What a detector says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_CHARACTERS = 500


@dataclass(frozen=True)
class Finding:
    """One fault, or the suspicion of one.

    kind      what is wrong, as the incident will be called: "hang", "straggler", "nonfinite", ...
    ranks     global ranks that are guilty, never those that only wait for them
    evidence  the numbers that show it, by name; JSON values. "told": the same for a person, where
              names and numbers do not say it by themselves
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

    def told(self) -> str:
        """The evidence in a line for a person."""
        sentence = self.evidence.get("told")
        parts = (f"{key} {_plain(value)}" for key, value in self.evidence.items())
        return (sentence if isinstance(sentence, str) else ", ".join(parts))[:MOST_CHARACTERS]


def _plain(value: Any) -> str:
    """Without the brackets and quotes of a program's values."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(one) for one in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
