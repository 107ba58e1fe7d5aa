"""What a user sets about an operator, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from megascale.errors import FluxError
from megascale.flux.mode import FluxMode
from megascale.flux.tuner import Tune

MODES: tuple[str, ...] = get_args(FluxMode)
TUNES: tuple[str, ...] = get_args(Tune)


@dataclass(frozen=True)
class Settings:
    """See `operators.py`; FluxError for values that are illegal or contradict."""

    mode: FluxMode = "auto"
    tune: Tune = "cache"
    spin: bool = True
    reserve_sms: int = 0
    deadline_s: float | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise FluxError(f"mode is {self.mode!r}; legal are {', '.join(MODES)}")
        if self.tune not in TUNES:
            raise FluxError(f"tune is {self.tune!r}; legal are {', '.join(TUNES)}")
        if self.tune == "now" and (self.mode != "auto" or not self.spin or self.reserve_sms):
            raise FluxError(
                'tune="now" compares all forms on the whole device; it goes with mode "auto", '
                f'spin=True and reserve_sms=0, got mode "{self.mode}", spin={self.spin} and '
                f"reserve_sms={self.reserve_sms}; what it stores is used with other settings too"
            )
        if self.mode == "fused" and not self.spin:
            raise FluxError(
                'mode is "fused", whose kernels wait for peers, and spin=False forbids it; use '
                'mode "auto" or "chunked"'
            )
        if self.reserve_sms < 0:
            raise FluxError(f"reserve_sms is {self.reserve_sms}; it must be 0 or more")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise FluxError(
                f"deadline_s is {self.deadline_s}; it must be positive, or None for no deadline"
            )
