"""Which form of the tensor-parallel operators runs. The choice is explicit and logged once; a form
that does not exist is refused by the configuration, never replaced silently.
"""

from __future__ import annotations

from typing import Literal

FluxMode = Literal["reference"]


def choose_mode(asked: str) -> FluxMode:
    """Resolve `parallelism.flux`; "auto" is the fastest form that exists for this machine."""
    assert asked in ("auto", "reference"), asked
    return "reference"
