"""What a rank of the bench measures besides its steps, as options of its command."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Beside:
    """What is measured beside the steps.

    roof    matrix products and attention alone, before and after the steps
    alone   linears without their communication, after the steps
    silent  the steps run without communication
    warm_up_s, round_s  of the roof
    """

    roof: bool = False
    alone: bool = False
    silent: bool = False
    warm_up_s: float = 3.0
    round_s: float = 0.5

    def flags(self) -> list[str]:
        """As options of `megascale bench rank`."""
        asked = [f"--{name}" for name in ("roof", "alone", "silent") if getattr(self, name)]
        return [*asked, f"--warm-up-s={self.warm_up_s}", f"--round-s={self.round_s}"]
