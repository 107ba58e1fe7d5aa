"""Whether two results of one operator agree: the limits by dtype, in one place.

Two measures, because they fail for different mistakes. The relative error of the whole tensor sees
a wrong sum or scale; a single tile that was never written is 1/12,288 of the largest output and
hides below its limit, so the worst element is compared with the typical one as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# ||out - reference|| / ||reference||: rounding of the partial sums and of the output
RELATIVE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4, torch.float64: 1e-12}
# max |out - reference| over the root mean square of the reference, as a multiple of RELATIVE;
# bf16 rounds a value of five standard deviations by 0.016 of one, a missing tile is off by five
WORST = 16.0
_BLOCK = 1 << 26  # elements compared at once


def mismatch(
    found: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype | None = None
) -> str:
    """What is wrong with `found`, "" where it agrees with `wanted`. Synchronises.

    dtype  whose rounding is allowed; without it that of each found tensor
    """
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return f"shapes {[list(t.shape) for t in found]} and not {[list(t.shape) for t in wanted]}"
    for out, reference in zip(found, wanted, strict=True):
        limit = RELATIVE[dtype or out.dtype]
        relative, worst = errors(out, reference)
        # `not <=`: NaN is wrong
        if not (relative <= limit and worst <= WORST * limit):
            return (
                f"relative error {relative:.2e} (limit {limit:.0e}), worst element off by "
                f"{worst:.2e} of the typical one (limit {WORST * limit:.0e})"
            )
    return ""


def errors(out: Tensor, reference: Tensor) -> tuple[float, float]:
    """(relative error of the tensor, error of the worst element in units of a typical one).

    By blocks of rows, so that little memory is needed beside a large result.
    """
    if out.numel() == 0:
        return 0.0, 0.0
    wide = torch.float64 if reference.dtype == torch.float64 else torch.float32
    rows = max(1, _BLOCK * out.shape[0] // out.numel())
    parts = []
    for found, wanted in zip(out.split(rows), reference.split(rows), strict=True):
        difference = found.to(wide) - wanted.to(wide)
        part = (difference.norm(), wanted.to(wide).norm(), difference.abs().max())
        parts.append(torch.stack(part).double())
    off, whole, worst = torch.stack(parts).unbind(1)
    relative = (off.norm() / whole.norm()).item()
    in_typical = (worst.max() / (whole.norm() / out.numel() ** 0.5)).item()
    return (0.0, 0.0) if off.count_nonzero() == 0 else (relative, in_typical)


def tensors_of(result: object) -> list[Tensor]:
    """The tensors in a result of nested tuples and lists, in order; None holds none."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in tensors_of(part)]
    assert result is None, type(result)
    return []
