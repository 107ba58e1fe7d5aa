"""`[operators]`: which kernels run what lies between the matrix products."""

from __future__ import annotations

from typing import Literal

from megascale.config.base import Section


class OperatorsConfig(Section):
    """Operators between the GEMMs (MegaScale 3.3), a switch for the ablation: "fused" are one-pass
    kernels and the fastest attention; "plain" is what was there before: a kernel for each
    elementwise operation, FlashAttention-2. On CPU both are the same formulas. Losses are equal
    within rounding."""

    mode: Literal["fused", "plain"] = "fused"
