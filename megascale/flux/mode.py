"""Which form of a tensor-parallel operator runs. The choice is explicit; nothing falls back
silently: asking for a form that is not there is an error that names the ones that are.
"""

from __future__ import annotations

from typing import Literal

from megascale.errors import ConfigError

FluxMode = Literal["reference"]


def choose_mode(asked: str) -> FluxMode:
    """Resolve `parallelism.flux`; "auto" is the fastest form that exists for this machine."""
    if asked in ("auto", "reference"):
        return "reference"
    raise ConfigError(
        f"parallelism.flux = {asked!r} is not available in this version; use 'reference' or 'auto'"
    )
