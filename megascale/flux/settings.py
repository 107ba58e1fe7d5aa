"""What a user sets about an operator, checked when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Real
from typing import Any, get_args

from megascale.errors import FluxError
from megascale.flux.mode import FluxMode
from megascale.flux.problem import whole_number
from megascale.flux.tuner import Tune

MODES: tuple[str, ...] = get_args(FluxMode)
TUNES: tuple[str, ...] = get_args(Tune)
DEADLINES_S = (1e-3, 1e6)  # the group's store counts milliseconds


@dataclass(frozen=True)
class Settings:
    """See `operators.py`; FluxError for values that are illegal or contradict."""

    mode: FluxMode = "auto"
    tune: Tune = "cache"
    spin: bool = True
    reserve_sms: int = 0
    deadline_s: float | None = None
    cache: str | None = None
    in_flight: bool = False
    view: bool = False

    def __post_init__(self) -> None:
        self._check_values()
        self._check_together()

    @property
    def of_all_ranks(self) -> str:
        """What decides the form of a call, and so must be equal on all ranks."""
        of_all = (
            f"mode={self.mode} tune={self.tune} spin={self.spin} reserve_sms={self.reserve_sms}"
        )
        asked = (name for name in ("in_flight", "view") if getattr(self, name))
        return " ".join((of_all, *(f"{name}=True" for name in asked)))

    @property
    def asked(self) -> tuple[str, ...]:
        """Forms that are asked for (`forms.on_request`)."""
        forms = {"in_flight": self.in_flight, "two_shot_view": self.view}
        return tuple(name for name, is_asked in forms.items() if is_asked)

    def _check_values(self) -> None:
        if self.mode not in MODES:
            raise FluxError(f"mode is {self.mode!r}; legal are {', '.join(MODES)}")
        if self.tune not in TUNES:
            raise FluxError(f"tune is {self.tune!r}; legal are {', '.join(TUNES)}")
        for name in ("spin", "in_flight", "view"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise FluxError(f"{name} is {value!r}; legal are True and False")
        whole_number("reserve_sms", self.reserve_sms)
        if self.deadline_s is not None and not _is_deadline(self.deadline_s):
            raise FluxError(
                f"deadline_s is {self.deadline_s!r}; it must be a number of seconds from "
                f"{DEADLINES_S[0]:g} to {DEADLINES_S[1]:g}, or None for no deadline"
            )
        if self.cache is not None and not _is_path(self.cache):
            raise FluxError(f"cache is {self.cache!r}; it must be the path of a file, or None")

    def _check_together(self) -> None:
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
        if self.in_flight and (self.mode not in ("auto", "fused") or not self.spin):
            raise FluxError(
                "in_flight asks for a kernel that waits for peers; it goes with mode "
                f'"auto" or "fused" and spin=True, got mode "{self.mode}" and spin={self.spin}'
            )
        if self.view and self.mode not in ("auto", "fused"):
            raise FluxError(
                'view asks for a result in symmetric memory; it goes with mode "auto" or "fused", '
                f'got mode "{self.mode}", whose result is a tensor of its own: leave view out'
            )


def _is_deadline(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return DEADLINES_S[0] <= float(value) <= DEADLINES_S[1]


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and str(value) != "" and "\0" not in str(value)
