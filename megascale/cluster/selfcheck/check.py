"""One check's verdict, as it goes over the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT = 1_500


@dataclass(frozen=True)
class Check:
    """ok  True passed, False failed, None did not apply here, and `reason` says why

    value, unit, expected  the figure that decided: the worst of all devices
    seconds                it took
    detail                 by device
    speed_only             it failed by a speed alone, so a second try may be fair
    """

    name: str
    ok: bool | None
    seconds: float = 0.0
    reason: str = ""
    value: float | None = None
    unit: str = ""
    expected: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    speed_only: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "value": None if self.value is None else round(self.value, 3),
            "unit": self.unit,
            "expected": None if self.expected is None else round(self.expected, 3),
            "seconds": round(self.seconds, 3),
            "reason": self.reason[:TEXT],
            "detail": dict(self.detail),
        }
